"""Ctrl-C during a step and between tokens, and outputs that do not take the text."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

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


@pytest.mark.timing
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
