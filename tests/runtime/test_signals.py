"""Ctrl-C at any time, and outputs that do not take the text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from parity import synthetic

PI_RUN = [sys.executable, "-m", "powerinfer_toolkit.runtime.cli"]
IN_A_STEP = """
import sys, time
from powerinfer_toolkit.runtime import Model

model = Model.load(sys.argv[1], threads=1, batch=1024, isa="scalar")
model.logits(range(3, 20))
print("ready", flush=True)
start = time.monotonic()
try:
    model.logits([5] * 1024)
except KeyboardInterrupt:
    kept = model.engine.kv_length()
    print("interrupted", time.monotonic() - start, kept, model.logits([5]).shape)
"""


# Says when the command itself begins: what Python does before, imports among it, is Python's.
COMMAND = """
import importlib, os, sys
from powerinfer_toolkit import cli

def run(*arguments, begin=cli._run):
    os.write(2, b"R")
    return begin(*arguments)

cli._run = run
raise SystemExit(importlib.import_module(sys.argv.pop(1)).main())
"""


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@pytest.fixture
def endless(synthetic_gguf) -> list[str]:
    """pi-run with a text of thousands of tokens: seconds."""
    path = str(synthetic_gguf("dense", n_ctx=16384))
    return [*PI_RUN, "-m", path, "-p", "w1", "--ignore-eos", "-c", "0", "-t", "1"]


@pytest.mark.resources
def test_ctrl_c_ends_a_step_between_layers(synthetic_gguf):
    """24 layers of some tenths of a second each: the step would take many seconds."""
    path = synthetic_gguf(
        "dense", n_layers=24, n_embd=128, n_ff=512, n_heads=8, head_dim=16, n_ctx=1024
    )
    with process(sys.executable, "-c", IN_A_STEP, str(path)) as child:
        assert child.stdout.readline() == b"ready\n"
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        word, seconds, kept, *shape = child.stdout.read().decode().split(maxsplit=3)
        assert (word, kept, shape) == ("interrupted", "0", ["(1, 293)\n"])
        assert 0.3 <= float(seconds) < 3
        assert child.wait() == 0


def test_ctrl_c_between_tokens(endless):
    with process(*endless) as child:
        first = os.read(child.stdout.fileno(), 1)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=30)
    assert len(first + out) > 0
    assert child.returncode == 130
    assert err.splitlines()[-1] == b"error: interrupted"
    assert b"Traceback" not in err


@pytest.fixture
def chatty(tmp_path) -> str:
    """A model with a chat template."""
    shape = synthetic.Shape(n_layers=1)
    weights = synthetic.dense_layout(synthetic.random_weights(shape, 0))
    template = {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    return str(synthetic.write_gguf(tmp_path / "m.gguf", shape, weights, keys=template))


@contextmanager
def command(*flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a group of its own, as a terminal would start it, at its first statement."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    argv = [sys.executable, "-c", COMMAND, *flags]
    child = subprocess.Popen(argv, **pipes, start_new_session=True)
    try:
        assert os.read(child.stderr.fileno(), 1) == b"R"
        yield child
    finally:
        child.kill()
        child.communicate()


RUN, BENCH = "powerinfer_toolkit.runtime.cli", "powerinfer_toolkit.runtime.bench"
N_MOMENTS = 6


@pytest.mark.resources
@pytest.mark.parametrize(
    "flags",
    [
        [RUN, "-p", "w1", "-n", "200", "--ignore-eos"],
        [RUN, "-n", "20", "--chat"],
        [RUN, "--perplexity", "text"],
        [BENCH, "-p", "64", "-n", "16", "-r", "2"],
        [RUN, "--doctor"],
    ],
    ids=["complete", "chat", "perplexity", "bench", "doctor"],
)
def test_ctrl_c_at_any_time(flags, chatty, tmp_path):
    """At moments spread over the whole run, once or twice in a row: 130 and one line, or all was done."""
    (tmp_path / "text").write_text("w1 w2 w3 " * 300)
    module, *rest = [str(tmp_path / flag) if flag == "text" else flag for flag in flags]
    flags = [module, "-m", chatty, *rest]
    start = time.monotonic()
    with command(*flags) as child:
        out, _ = child.communicate(b"w1\nw2\n")
        assert (child.returncode, bool(out)) == (0, True)
    duration = time.monotonic() - start
    for moment in range(N_MOMENTS):
        with command(*flags) as child:
            time.sleep(0.02 + duration * moment / N_MOMENTS)
            for _ in range(1 + moment % 2):
                os.killpg(child.pid, signal.SIGINT)
                time.sleep(0.002)
            _, err = child.communicate(b"w1\nw2\n", timeout=30)
        assert child.returncode in (0, 130), err
        assert b"Traceback" not in err
        assert b"Exception ignored" not in err
        if child.returncode == 130:
            assert err.splitlines()[-1] == b"error: interrupted"


@pytest.mark.parametrize("closed", ["0", "1", "2"])
def test_closed_streams(closed, synthetic_gguf):
    """What the shell's <&-, >&- and 2>&- do: nothing of one stream comes out of another."""
    path = str(synthetic_gguf("dense"))
    flags = [*PI_RUN, "-m", path, "-p", "w1", "-n", "4", "--temp", "0", "--ignore-eos"]
    whole = subprocess.run(flags, capture_output=True, check=True)
    shell = f'exec "$@" {closed}>&-'
    done = subprocess.run(["sh", "-c", shell, "sh", *flags], capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stdout == (b"" if closed == "1" else whole.stdout)
    assert (done.stderr == b"") == (closed == "2")


@pytest.mark.parametrize("flags", [["-p", "w1", "-n", "40"], ["-p", "w1", "-c", "99999"]])
def test_nobody_reads_the_talk(flags, synthetic_gguf):
    """stderr is a pipe that was closed: the code is that of a closed pipe, not of a crash."""
    command = [*PI_RUN, "-m", str(synthetic_gguf("dense")), *flags]
    with process(*command) as child:
        child.stderr.close()
        child.stdout.read()
        assert child.wait(timeout=30) == 141
        child.stderr = None


def test_a_closed_pipe(endless):
    with process(*endless, "-q") as child:
        os.read(child.stdout.fileno(), 1)
        child.stdout.close()
        assert child.wait(timeout=30) == 141
        assert child.stderr.read() == b""


def test_a_full_disk(endless):
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*endless, "-q"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: No space left on device")
    assert b"Traceback" not in done.stderr


def test_a_terminal_without_the_characters(synthetic_gguf):
    """Bytes that are no UTF-8 come out as U+FFFD, which Latin-1 does not have."""
    path = str(synthetic_gguf("dense"))
    command = [
        *PI_RUN,
        "-m",
        path,
        "-p",
        "w1",
        "-n",
        "100",
        "--ignore-eos",
        "--temp",
        "2",
        "-s",
        "1",
    ]
    latin = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, env=latin, check=False)
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout
