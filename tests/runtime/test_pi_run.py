"""pi-run as a user meets it: what goes where, exit codes, refusals."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from parity import synthetic
from powerinfer_toolkit import __version__
from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.cli import main
from powerinfer_toolkit.runtime.plan.plan import Plan
from powerinfer_toolkit.runtime.report import token_hash
from powerinfer_toolkit.runtime.sampling import Sampling
from refusals import Said, assert_refused, run_command

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
    "device": str,
    "device_bytes": int,
    "vram_budget_bytes": int,
    "layers": list,
}


@pytest.fixture
def dense(synthetic_gguf) -> str:
    return str(synthetic_gguf("dense"))


@pytest.fixture
def pi_run(capsys):
    """Runs the command with `stdin`; None is a terminal."""
    return partial(run_command, main, capsys)


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
    assert len(record["token_ids"]) == 12
    assert record["decode_tokens"] == 11, "the first comes out of the prompt"
    assert record["text"] + "\n" == complete(pi_run, dense, "-p", "w1 w2").out
    assert record["active_share"] == 1.0
    assert record["peak_rss_bytes"] > 2**20
    assert (record["device"], record["device_bytes"], record["vram_budget_bytes"]) == ("", 0, 0)


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
        (["-ngl", 20], "-ngl is not supported"),
        (["--handover", "event"], "--handover event has no effect without a GPU"),
        (["--vram-budget", -2], "is out of range"),
        (["--vram-budget", "much"], "is no size"),
        (["--ffn", "exact"], "ReLU"),
        (["--ffn", "sparse"], "invalid choice"),
        (["--predict-all", "--ffn", "dense"], "predict-all"),
        (["--predict-all"], "ReLU"),
        (["--sparse-threshold", 0], "no effect"),
        (["--sparse-threshold", "nan"], "sparse threshold"),
        (["-t", 0], "threads 0"),
        (["-t", -1], "threads -1"),
        (["-t", 10**6], "threads 1000000"),
        (["-t", "many"], "invalid int"),
        (["-t", "1.5"], "invalid int"),
        (["-t"], "expected one argument"),
        (["-c", 513], "above the 512"),
        (["-c", -5], "context -5"),
        (["-c", 10**30], "above the 512"),
        (["-b", 0], "batch 0"),
        (["-b", -1], "batch -1"),
        (["-b", 10**6], "batch 1000000"),
        (["-n", -3], "n-predict -3"),
        (["-n", "ten"], "invalid int"),
        (["-s", -2], "seed -2"),
        (["-s", 2**64], "seed 18446744073709551616"),
        (["--temp", -0.1], "temperature -0.1"),
        (["--temp", "nan"], "temperature nan"),
        (["--temp", "inf"], "temperature inf"),
        (["--temp", 1e39], "temperature 1e+39"),
        (["--top-k", -1], "top-k -1"),
        (["--top-k", 2**31], "top-k 2147483648"),
        (["--top-p", 1.1], "top-p 1.1"),
        (["--top-p", -0.1], "top-p -0.1"),
        (["--top-p", "nan"], "top-p nan"),
        (["--min-p", -1], "min-p -1.0"),
        (["--min-p", "1e400"], "min-p inf"),
        (["--repeat-penalty", 0], "repeat-penalty 0"),
        (["--repeat-penalty", 1e-30], "repeat-penalty 1e-30"),
        (["--repeat-last-n", -2], "repeat-last-n -2"),
        (["--kv-type", "q4_0"], "invalid choice"),
        (["--activation-type", "f16"], "invalid choice"),
        (["--isa", "sse9"], "sse9"),
        (["-sys", "You are terse."], "--chat"),
        (["--window", 9], "--perplexity"),
        (["--chunks", 3], "--perplexity"),
        (["--perplexity", "x"], "own file"),
        (["-f", "x"], "not allowed with"),
        (["--no-such-flag"], "unrecognized"),
    ],
)
def test_usage_errors(pi_run, dense, flags, says):
    assert_refused(pi_run("-m", dense, "-p", "w1", *flags), 2, says)


@pytest.mark.parametrize("flags", [["--vram-budget", 0], ["--vram-budget", "0GiB"]])
def test_powerinfer_flags_without_a_gpu(pi_run, dense, flags):
    plain = complete(pi_run, dense, "-p", "w1")
    gpu = complete(pi_run, dense, "-p", "w1", *flags, "--reset-gpu-index", "--disable-gpu-index")
    assert (gpu.code, gpu.out) == (0, plain.out)


def test_no_prompt_on_a_terminal(pi_run, dense):
    assert_refused(pi_run("-m", dense), 2, "no prompt")


def test_no_model(pi_run):
    assert_refused(pi_run("-p", "w1"), 2, "no model given")
    assert_refused(pi_run("-m", "", "-p", "w1"), 2, "no model given")


PROMPT_FILES = {
    "missing": (lambda path: None, "No such file"),
    "directory": (Path.mkdir, "Is a directory"),
    "binary": (lambda path: path.write_bytes(bytes(range(256))), "is not UTF-8"),
    "UTF-16": (lambda path: path.write_text("w1", encoding="utf-16"), "is not UTF-8"),
    "Latin-1": (lambda path: path.write_text("é", encoding="latin-1"), "is not UTF-8"),
    "too long": (lambda path: path.write_text("w1 " * 300), "does not fit the context of 64"),
}


@pytest.mark.parametrize("flag", ["-f", "--perplexity"])
@pytest.mark.parametrize("what", PROMPT_FILES)
def test_prompt_files_that_will_not_do(pi_run, dense, what, flag, tmp_path):
    make, says = PROMPT_FILES[what]
    make(tmp_path / "two words é")
    said = pi_run("-m", dense, "-c", 64, flag, tmp_path / "two words é")
    if flag == "--perplexity" and what == "too long":  # it is cut into windows
        assert said.code == 0
    else:
        assert_refused(said, 1, says)


def test_prompts_that_are_no_text(pi_run, dense):
    assert_refused(pi_run("-m", dense, stdin=b"\xff\xfe"), 1, "stdin is not UTF-8")
    # what the shell passes on of an argument that is no text
    assert_refused(pi_run("-m", dense, "-p", "\udcff"), 1, "not valid UTF-8")


@pytest.mark.parametrize("stdin", [b"", b"\n"])
def test_an_empty_prompt(pi_run, stdin, tmp_path):
    """Nothing to start from, where the model has no BOS that could stand alone."""
    shape = synthetic.Shape(n_layers=1)
    weights = synthetic.dense_layout(synthetic.random_weights(shape, 0))
    keys = {"tokenizer.ggml.add_bos_token": False}
    path = synthetic.write_gguf(tmp_path / "m.gguf", shape, weights, keys=keys)
    assert_refused(pi_run("-m", path, stdin=stdin), 2, "the prompt is empty")
    assert_refused(pi_run("-m", path, "-p", ""), 2, "the prompt is empty")


def test_a_long_prompt_is_refused(pi_run, dense):
    said = pi_run("-m", dense, "-p", "w1 " * 30, "-c", 16)
    assert_refused(said, 1, "does not fit the context of 16")


def test_chat_needs_a_template(pi_run, dense):
    assert_refused(pi_run("-m", dense, "-p", "w1", "--chat"), 1, "no chat template")


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
        assert model.tokenizer.adds_bos  # so that every window starts with it
        losses = []
        for begin in range(0, len(ids), 23):
            window = [model.tokenizer.bos_id, *ids[begin : begin + 23]]
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


def test_perplexity_of_a_model_that_does_not_work(pi_run, tmp_path):
    """Weights that are no numbers: an error, no `nan`."""
    shape = synthetic.Shape(n_layers=1)
    weights = synthetic.dense_layout(synthetic.random_weights(shape, 0))
    weights["output_norm.weight"][:] = np.nan
    path = synthetic.write_gguf(tmp_path / "m.gguf", shape, weights)
    text, _ = write_text(tmp_path)
    said = pi_run("-m", path, "--perplexity", text)
    assert_refused(said, 1, "the mean negative log-likelihood of the text is nan")
    assert_refused(pi_run("-m", path, "-p", "w1"), 1, "no finite number")


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

    monkeypatch.setattr(actions, "look", lambda _: Machine(1, 1, 10**6))
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
    for topic in ("library", "kernels", "scalar", "machine", "GPU", "2 layers", "293 tokens"):
        assert topic in said.out


def test_doctor_names_what_is_wrong(pi_run, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    said = pi_run("--doctor", "-m", tmp_path / "bad.gguf")
    assert said.code == 1
    assert said.out.count("FAILED") == 3
    assert "3 of 8 checks failed" in said.err
