"""pi-run as a user meets it: what goes where, exit codes, refusals."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from powerinfer_toolkit import __version__
from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.cli import main
from powerinfer_toolkit.runtime.plan.plan import Plan
from powerinfer_toolkit.runtime.report import token_hash
from powerinfer_toolkit.runtime.sampling import Sampling

RECORD = {
    "text": str,
    "token_ids": list,
    "prompt_tokens": int,
    "decode_tokens": int,
    "prompt_seconds": float,
    "decode_seconds": float,
    "ffn_mode": str,
    "active_share": float,
    "load_seconds": float,
    "peak_rss_bytes": int,
}


class Said:
    """Exit code, stdout and stderr of one run."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def dense(synthetic_gguf) -> str:
    return str(synthetic_gguf("dense"))


@pytest.fixture
def pi_run(capsys, monkeypatch):
    """Runs the command with `stdin`; None is a terminal."""

    def run(*flags: object, stdin: bytes | None = None) -> Said:
        source = io.TextIOWrapper(io.BytesIO(stdin or b""))
        monkeypatch.setattr(source, "isatty", lambda: stdin is None, raising=False)
        monkeypatch.setattr(sys, "stdin", source)
        try:
            code = main([str(flag) for flag in flags])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
        return Said(code, *capsys.readouterr())

    return run


def complete(run, model: str, *flags: object, **options: object) -> Said:
    return run("-m", model, "-n", 12, "--temp", 0, "--ignore-eos", *flags, **options)


def test_stdout_is_the_text_and_stderr_ends_with_timings(pi_run, dense):
    said = complete(pi_run, dense, "-p", "w1 w2 w3")
    with Model.load(dense) as model:
        ids = model.tokenizer.encode("w1 w2 w3")
        for _ in range(12):
            ids.append(int(model.logits(ids)[-1].argmax()))
        tokens = ids[-12:]
        stream = model.tokenizer.decoder()
        text = "".join([*map(stream.feed, tokens), stream.finish()])
    assert (said.code, said.out) == (0, text + "\n")
    timings = said.err.splitlines()[-1]
    assert "11 tokens" in timings
    assert "ffn dense, 100.0% active" in timings
    assert timings.endswith(f"tokens {token_hash(tokens)}")


def test_quiet_says_nothing(pi_run, dense):
    said = complete(pi_run, dense, "-p", "w1", "-q")
    assert said.out
    assert said.err == ""


def test_verbose_prints_the_plan(pi_run, dense):
    said = complete(pi_run, dense, "-p", "w1", "-v")
    assert "KV cache" in said.err
    assert "seed" in said.err


def test_json_record(pi_run, dense):
    said = complete(pi_run, dense, "-p", "w1 w2", "--json")
    record = json.loads(said.out)
    assert {name: type(value) for name, value in record.items()} == RECORD
    assert record["decode_tokens"] == len(record["token_ids"]) == 12
    assert record["text"] + "\n" == complete(pi_run, dense, "-p", "w1 w2").out
    assert record["active_share"] == 1.0
    assert record["peak_rss_bytes"] > 2**20


@pytest.mark.parametrize("flags", [["-p", "-"], []])
def test_prompt_from_stdin(pi_run, dense, flags):
    piped = complete(pi_run, dense, *flags, stdin=b"w1 w2\n")
    assert piped.out == complete(pi_run, dense, "-p", "w1 w2").out
    more = complete(pi_run, dense, *flags, "--json", stdin=b"w1 w2\n\n")
    given = complete(pi_run, dense, "-p", "w1 w2\n", "--json")
    assert json.loads(more.out)["prompt_tokens"] == json.loads(given.out)["prompt_tokens"]


def test_prompt_from_a_file(pi_run, dense, tmp_path):
    (tmp_path / "prompt").write_text("w3 w4\n")
    from_file = complete(pi_run, dense, "-f", tmp_path / "prompt")
    assert from_file.out == complete(pi_run, dense, "-p", "w3 w4").out


def test_a_full_context_is_said(pi_run, dense):
    said = pi_run("-m", dense, "-p", "w1 w2 w3", "-c", 16, "--ignore-eos", "--temp", 0)
    assert said.code == 0
    assert "the context of 16 tokens is full" in said.err


def test_seeds_repeat_on_any_thread_count(pi_run, dense):
    texts = {
        pi_run("-m", dense, "-p", "w1", "-n", 30, "--temp", 1.5, "-s", 5, "-t", t).out
        for t in (1, 2, 3)
    }
    assert len(texts) == 1
    other = pi_run("-m", dense, "-p", "w1", "-n", 30, "--temp", 1.5, "-s", 6)
    assert other.out not in texts


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-ngl", 20], "--vram-budget"),
        (["--vram-budget", 4], "without a GPU"),
        (["--vram-budget", -1], "without a GPU"),
        (["--vram-budget", "6000MiB"], "without a GPU"),
        (["--vram-budget", "much"], "is no size"),
        (["--ffn", "exact"], "ReLU"),
        (["--ffn", "sparse"], "invalid choice"),
        (["--predict-all", "--ffn", "dense"], "predict-all"),
        (["--predict-all"], "ReLU"),
        (["--sparse-threshold", 0], "no effect"),
        (["-t", 0], "threads 0"),
        (["-t", "many"], "invalid int"),
        (["-c", 513], "above the 512"),
        (["-c", -5], "context -5"),
        (["-b", 0], "batch 0"),
        (["-n", -3], "n-predict -3"),
        (["-s", -2], "seed -2"),
        (["--temp", -0.1], "temperature -0.1"),
        (["--temp", "nan"], "temperature nan"),
        (["--top-k", -1], "top-k -1"),
        (["--top-p", 1.1], "top-p 1.1"),
        (["--min-p", -1], "min-p -1.0"),
        (["--repeat-penalty", 0], "repeat-penalty 0"),
        (["--repeat-last-n", -2], "repeat-last-n -2"),
        (["--kv-type", "q4_0"], "invalid choice"),
        (["--activation-type", "f16"], "invalid choice"),
        (["--isa", "sse9"], "sse9"),
        (["-sys", "You are terse."], "--chat"),
        (["--window", 9], "--perplexity"),
        (["--perplexity", "x"], "own file"),
        (["-f", "x"], "not allowed with"),
        (["--no-such-flag"], "unrecognized"),
    ],
)
def test_usage_errors(pi_run, dense, flags, says):
    said = pi_run("-m", dense, "-p", "w1", *flags)
    assert said.code == 2
    assert says in said.err
    assert said.out == ""
    assert "Traceback" not in said.err


@pytest.mark.parametrize("flags", [["--vram-budget", 0], ["--vram-budget", "0GiB"]])
def test_powerinfer_flags_without_a_gpu(pi_run, dense, flags):
    plain = complete(pi_run, dense, "-p", "w1")
    gpu = complete(pi_run, dense, "-p", "w1", *flags, "--reset-gpu-index", "--disable-gpu-index")
    assert (gpu.code, gpu.out) == (0, plain.out)


def test_no_prompt_on_a_terminal(pi_run, dense):
    said = pi_run("-m", dense)
    assert said.code == 2
    assert "no prompt" in said.err


def test_no_model(pi_run):
    assert pi_run("-p", "w1").code == 2


def test_missing_files(pi_run, dense, tmp_path):
    for flags in (["-m", tmp_path / "no.gguf", "-p", "x"], ["-m", dense, "-f", tmp_path / "no"]):
        said = pi_run(*flags)
        assert said.code == 1
        assert said.err.splitlines()[-2].startswith("error: ")
        assert said.err.splitlines()[-1].startswith("hint: ")


def test_prompts_that_are_no_text(pi_run, dense):
    said = pi_run("-m", dense, stdin=b"\xff\xfe")
    assert (said.code, said.out) == (1, "")
    assert "stdin is not UTF-8" in said.err


def test_a_long_prompt_is_refused(pi_run, dense):
    said = pi_run("-m", dense, "-p", "w1 " * 30, "-c", 16)
    assert said.code == 1
    assert "does not fit the context of 16" in said.err


def test_chat_needs_a_template(pi_run, dense):
    said = pi_run("-m", dense, "-p", "w1", "--chat")
    assert said.code == 1
    assert "no chat template" in said.err


CHAT = "<|im_start|>{}\n{}<|im_end|>\n"  # ChatML, what SmolLM2 was tuned on


def test_a_prompt_in_a_chat_is_one_turn(pi_run, smollm2_gguf):
    flags = ["--chat", "-sys", "Be terse.", "-p", "What is 2+2?", "-n", 8, "--temp", 0]
    said = pi_run("-m", smollm2_gguf, *flags, "--json")
    record = json.loads(said.out)
    with Model.load(smollm2_gguf) as model:
        prompt = CHAT.format("system", "Be terse.") + CHAT.format("user", "What is 2+2?")
        tokens = model.tokenizer.encode(prompt + "<|im_start|>assistant\n", add_special=False)
        generation = model.generate(tokens, n_predict=8, sampling=Sampling(temperature=0))
        assert [token.id for token in generation] == record["token_ids"]
    assert record["prompt_tokens"] == len(tokens)
    assert pi_run("-m", smollm2_gguf, *flags).out == record["text"] + "\n"


def test_piped_messages_are_turns(pi_run, smollm2_gguf):
    flags = ["-m", smollm2_gguf, "--chat", "-n", 6, "--temp", 0]
    said = pi_run(*flags, stdin=b"What is 2+2?\n\nAnd 3+3?\n")
    assert said.code == 0
    alone = pi_run(*flags, "-p", "What is 2+2?")
    assert said.out.startswith(alone.out)
    assert len(said.out) > len(alone.out)


def test_json_of_a_chat_needs_its_message(pi_run, dense):
    said = pi_run("-m", dense, "--chat", "--json", stdin=b"hello\n")
    assert said.code == 2
    assert "one answer" in said.err


# ---- perplexity


def write_text(folder: Path) -> tuple[Path, str]:
    text = " ".join(f"w{i % 30}" for i in np.random.default_rng(0).integers(0, 30, 100))
    (folder / "text").write_text(text)
    return folder / "text", text


def test_perplexity(pi_run, dense, tmp_path):
    path, text = write_text(tmp_path)
    said = pi_run("-m", dense, "--perplexity", path, "--json", "--window", 24)
    record = json.loads(said.out)
    with Model.load(dense) as model:
        ids = model.tokenizer.encode(text, add_special=False)
        assert model.tokenizer.bos_id is None  # so that windows start with the text's own tokens
        losses = []
        for begin in range(0, len(ids), 24):
            window = ids[begin : begin + 24]
            logits = model.logits(window).astype(np.float64)
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            losses += [-logits[i, token] for i, token in enumerate(window[1:])]
    # float32 log-probabilities near 5: 1e-6 relative
    assert record["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert record["tokens"] == len(losses)
    assert (record["ffn_mode"], record["active_share"]) == ("dense", 1.0)
    assert set(record) == {"perplexity", "tokens", "ffn_mode", "active_share"}


def test_perplexity_of_fewer_windows(pi_run, dense, tmp_path):
    path, _ = write_text(tmp_path)
    said = pi_run("-m", dense, "--perplexity", path, "--window", 24, "--chunks", 2)
    assert said.code == 0
    assert "over 46 tokens" in said.out


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("", [], "no token"),
        ("w1", ["--window", 1], "window of 1"),
        ("w1 w2", ["--window", 999], "999"),
    ],
)
def test_perplexity_of_nothing(pi_run, dense, tmp_path, text, flags, says):
    (tmp_path / "text").write_text(text)
    said = pi_run("-m", dense, "--perplexity", tmp_path / "text", *flags)
    assert said.code == 2
    assert says in said.err


# ---- what needs no run


def test_dry_run_prints_the_plan(pi_run, synthetic_gguf):
    path = synthetic_gguf("predictors")
    said = pi_run("-m", path, "--dry-run", "--ffn", "predicted", "-c", 64)
    assert said.code == 0
    assert "predicted for steps of 1 to 1 tokens" in said.out
    assert "exact for steps of 17 to 64 tokens" in said.out
    as_json = pi_run("-m", path, "--dry-run", "--ffn", "predicted", "-c", 64, "--json")
    assert Plan.from_json(as_json.out).n_context == 64


def test_what_does_not_fit(pi_run, dense, monkeypatch):
    from powerinfer_toolkit.runtime import actions
    from powerinfer_toolkit.runtime.plan.machine import Machine

    monkeypatch.setattr(actions, "probe", lambda: Machine(1, 1, 10**6))
    said = pi_run("-m", dense, "--dry-run")
    assert said.code == 3
    assert "KiB of memory are available" in said.err


def test_version(pi_run, libpi):
    said = pi_run("--version")
    assert said.code == 0
    assert f"pi-run {__version__}" in said.out
    assert "ABI 1" in said.out


def test_doctor(pi_run, dense):
    said = pi_run("--doctor", "-m", dense)
    assert said.code == 0
    for topic in ("library", "kernels", "scalar", "machine", "2 layers", "293 tokens"):
        assert topic in said.out


def test_doctor_names_what_is_wrong(pi_run, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    said = pi_run("--doctor", "-m", tmp_path / "bad.gguf")
    assert said.code == 1
    assert said.out.count("FAILED") == 2
    assert "2 of 6 checks failed" in said.err
