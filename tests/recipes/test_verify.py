"""pi-verify on tiny models: what matches passes, and every kind of fault is seen (about 30 s)."""

import json
import shutil
from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

pytest.importorskip("torch")

from parity import checkpoints
from parity.closeness import mean_kl, relative_l2
from parity.sparse_checkpoint import N_EMBD, N_FF, N_LAYERS, text_of, write_sparse_checkpoint
from powerinfer_toolkit.convert.cli import main as pi_convert
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.recipes.verify import VerifySettings, verify
from powerinfer_toolkit.recipes.verify.cli import main as pi_verify
from powerinfer_toolkit.recipes.verify.distance import Distance, Loss
from powerinfer_toolkit.training.sources import DataSource
from refusals import run_command

pytestmark = pytest.mark.slow
RANK = 32


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A ReLU checkpoint with random predictors, whose masks change the perplexity, and activation counts."""
    folder = write_sparse_checkpoint(tmp_path_factory.mktemp("sparse") / "tiny", n_blocks=32)
    rng = np.random.default_rng(0)
    (folder / "predictors").mkdir()
    write_predictors(folder / "predictors", rng)
    np.save(folder / "counts.npy", rng.integers(1, 1000, (N_LAYERS, N_FF)))
    return folder


def write_predictors(folder, rng):
    for layer in range(N_LAYERS):
        fc1 = rng.standard_normal((RANK, N_EMBD), dtype=np.float32)
        fc2 = rng.standard_normal((N_FF, RANK), dtype=np.float32) + np.float32(0.2)
        tensors = {"fc1.weight": fc1.astype(np.float16), "fc2.weight": fc2.astype(np.float16)}
        save_file(tensors, folder / f"model_{layer}.safetensors")


@pytest.fixture(scope="module")
def text(sparse):
    path = sparse / "text.txt"
    lines = (sparse / "text.jsonl").read_text().splitlines()
    path.write_text("\n".join(json.loads(line)["text"] for line in lines))
    return str(path)


def convert(source, name, *flags):
    path = source / name
    assert pi_convert([str(source), str(path), "-q", "--force", *map(str, flags)]) == 0
    return path


@pytest.fixture(scope="module")
def predicted(sparse):
    flags = ["--predictors", sparse / "predictors", "--activations", sparse / "counts.npy"]
    return convert(sparse, "predicted.gguf", "--outtype", "f32", *flags)


def settings(text, **changes):
    return VerifySettings(
        **({"file": text, "max_length": 64, "max_tokens": 1200, "threads": 1} | changes)
    )


def failed(report):
    return [check["name"] for check in report["checks"] if not check["passed"]]


def test_a_hot_first_file_with_predictors_matches(sparse, predicted, text):
    """The sidecar names the neurons, so that the weights are compared too, and are the same to the bit."""
    report = verify(str(sparse), predicted, settings(text))
    assert failed(report) == []
    assert report["passed"] is True
    assert report["ffn_mode"] == "exact"
    assert report["source"]["matches"] is True
    assert report["weight_errors"] == {"F32": 0.0}
    assert report["logits"]["checkpoint"] == report["logits"]["file_weights"]
    assert report["logits"]["checkpoint"]["relative_l2"] < 1e-5
    assert report["logits"]["checkpoint"]["top1_agreement"] == 1.0
    found = report["perplexity"]
    assert found["exact"] == pytest.approx(found["checkpoint"], rel=1e-5)
    assert found["predicted"] == pytest.approx(found["predicted_torch"], rel=1e-3)
    assert found["predicted"] > 1.1 * found["exact"]
    json.dumps(report)


def test_without_the_sidecar_masks_and_logits_still_match(sparse, predicted, text, tmp_path):
    alone = shutil.copy(predicted, tmp_path / "alone.gguf")
    report = verify(sparse, alone, settings(text))
    assert failed(report) == []
    assert report["weight_errors"] == {"F32": 0.0}  # those that are not numbered by neurons
    found = report["perplexity"]
    assert found["file_weights"] == pytest.approx(found["checkpoint"], rel=1e-5)
    assert found["predicted"] == pytest.approx(found["predicted_torch"], rel=1e-3)


def test_trained_predictors_beside_those_of_the_file(sparse, predicted, text, tmp_path):
    same = verify(sparse, predicted, settings(text, predictors=str(sparse / "predictors")))
    found = same["perplexity"]
    assert failed(same) == []
    assert found["predicted_checkpoint"] == pytest.approx(found["predicted_torch"], rel=1e-6)
    write_predictors(tmp_path, np.random.default_rng(1))
    other = verify(sparse, predicted, settings(text, predictors=str(tmp_path)))
    assert failed(other) == ["perplexity, predicted, relative to the trained predictors'"]


def test_held_out_documents_are_those_of_training(sparse, predicted):
    sources = [DataSource(**source) for source in text_of(sparse)]
    report = verify(
        sparse,
        predicted,
        settings(None, dataset_mixture=sources, held_out_share=0.5, max_tokens=256),
    )
    assert failed(report) == []
    assert report["tokens"] == report["windows"] * 63
    whole = verify(sparse, predicted, settings(None, eval_mixture=sources, max_tokens=256))
    assert (whole["windows"], failed(whole)) == (4, [])


@pytest.mark.parametrize(
    ("case", "outtype"),
    [
        ("gqa", "bf16"),
        ("gqa", "q4_0"),
        ("relu_blocks", "q4_0"),
        ("rope_llama3", "f16"),
        ("attention_bias", "q8_0"),
    ],
)
def test_types_and_shapes_match(case, outtype, text, tmp_path):
    """Random weights bear quantisation badly: what the KL of coarse types should be is not asked of them."""
    checkpoints.save_checkpoint(checkpoints.tiny_model(case), tmp_path)
    path = convert(tmp_path, "model.gguf", "--outtype", outtype)
    report = verify(tmp_path, path, settings(text, max_tokens=200, max_kl=2.0))
    assert failed(report) == []
    assert report["ffn_mode"] == ("exact" if case == "relu_blocks" else "dense")
    assert set(report["perplexity"]) == {"checkpoint", "file_weights", report["ffn_mode"]}
    if outtype == "q4_0":
        assert report["logits"]["checkpoint"]["kl"] > 100 * report["logits"]["file_weights"]["kl"]
        assert 0.05 < report["weight_errors"]["Q4_0"] < 0.15


def changed(source, folder, config=None, weights=None):
    """A copy of a checkpoint with other settings or weights."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.gguf", "tokens"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | (config or {})))
    if weights is not None:
        tensors = load_file(folder / "model.safetensors")
        weights(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_wrong_settings_in_the_file_are_seen_in_the_logits(sparse, text, tmp_path):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    other = changed(sparse, tmp_path / "other", rope)
    path = convert(other, "model.gguf", "--outtype", "f32")
    report = verify(sparse, path, settings(text))
    assert report["source"]["matches"] is True
    assert "logits, relative L2" in failed(report)
    assert "KL from the checkpoint" in failed(report)
    assert not [name for name in failed(report) if name.startswith("weights")]


def test_the_threshold_of_fatrelu_is_part_of_the_function(sparse, text, tmp_path):
    """transformers alone would ignore it: the limits tell a file with it from a checkpoint without."""
    other = changed(sparse, tmp_path / "other", {"activation_threshold": 0.2})
    path = convert(other, "model.gguf", "--outtype", "f32")
    assert failed(verify(other, path, settings(text))) == []
    assert "logits, relative L2" in failed(verify(sparse, path, settings(text)))


def swap_two_rows(tensors):
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name][[0, 1]] = tensors[name][[1, 0]]


def test_other_weights_are_refused_or_seen(sparse, text, tmp_path):
    other = changed(sparse, tmp_path / "other", weights=swap_two_rows)
    path = convert(other, "model.gguf", "--outtype", "f32")
    with pytest.raises(PiError, match=r"was made from weights \w{16}, tiny has \w{16}"):
        verify(sparse, path, settings(text))
    report = verify(sparse, path, settings(text, check_source=False))
    assert report["source"]["matches"] is False
    assert "weights in F32, relative L2" in failed(report)
    assert "logits, relative L2" not in failed(report)  # the engine is right about these weights


def test_another_tokenizer_is_seen(sparse, predicted, text, tmp_path):
    other = changed(sparse, tmp_path / "other")
    spec = json.loads((other / "tokenizer.json").read_text())
    vocabulary = spec["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(spec))
    report = verify(other, predicted, settings(text))
    assert failed(report) == ["windows that the file tokenises differently"]


def test_a_checkpoint_of_other_sizes_is_refused(predicted, text, tmp_path):
    checkpoints.save_checkpoint(checkpoints.tiny_model("relu"), tmp_path)
    with pytest.raises(PiError, match="another model: n_layers is 3, the checkpoint's is 2"):
        verify(tmp_path, predicted, settings(text))


def test_predictors_that_the_file_does_not_have(sparse, text):
    path = convert(sparse, "plain.gguf", "--outtype", "f32")
    report = verify(sparse, path, settings(text))
    assert failed(report) == []
    assert set(report["perplexity"]) == {"checkpoint", "file_weights", "exact"}
    with pytest.raises(UsageError, match="the file has no predictors"):
        verify(sparse, path, settings(text, predictors=str(sparse / "predictors")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_that_torch_rounds(sparse, predicted, text, dtype):
    """The checkpoint is float32, and so is the file."""
    report = verify(sparse, predicted, settings(text, torch_dtype=dtype))
    assert failed(report) == []
    assert 0 < report["weight_errors"]["F32"] < {"bfloat16": 2**-8, "float16": 2**-11}[dtype]


def test_the_command(sparse, predicted, text, capsys, tmp_path):
    flags = ["-f", text, "--max_length", 64, "--max_tokens", 300, "--threads", 1]
    said = run_command(pi_verify, capsys, sparse, predicted, *flags)
    assert said.code == 0, said.err
    assert "recorded as its source" in said.out
    assert "file, predicted" in said.out
    assert " NO" not in said.out
    said = run_command(pi_verify, capsys, sparse, predicted, *flags, "--json")
    assert json.loads(said.out)["passed"] is True
    tight = run_command(pi_verify, capsys, sparse, predicted, *flags, "--max_kl", "1e-30")
    assert tight.code == 1
    assert " NO" in tight.out
    assert "error: predicted.gguf does not match tiny: KL from the checkpoint" in tight.err


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ([], 2, "no text to measure on"),
        (["-f", "{text}", "--eval_mixture", "[{{path: x}}]"], 2, "exclude each other"),
        (["-f", "{text}", "--max_tokens", "0"], 2, "max_tokens is 0"),
        (["-f", "{text}", "--max_length", "1"], 2, "nothing to predict"),
        (["-f", "{text}.missing"], 1, "No such file"),
        (["-f", "{text}", "--max_length", "4096"], 2, "above the 256"),
        (["-f", "{text}", "--max_length", "4096"], 2, "hint: --max_length 256"),
        (["-f", "{text}", "--device", "meta"], 2, "cannot compute on device 'meta'"),
        (["-f", "{text}", "--max_length", "64", "--threads", "100000"], 2, "is out of range"),
    ],
)
def test_settings_that_are_refused(sparse, predicted, text, capsys, flags, code, said):
    words = [flag.format(text=text) for flag in flags]
    done = run_command(pi_verify, capsys, sparse, predicted, *words)
    assert (done.code, done.out) == (code, "")
    assert said in done.err


def test_a_gpu_that_is_taken_unasked_and_does_not_compute(
    sparse, predicted, text, capsys, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", _fail(RuntimeError("no kernel image")))
    done = run_command(pi_verify, capsys, sparse, predicted, "-f", text)
    assert (done.code, done.out) == (2, "")
    assert "error: torch cannot compute on device 'cuda' here" in done.err
    assert "hint: cpu works anywhere" in done.err


def test_a_gpu_that_is_too_small(sparse, predicted, text, capsys, monkeypatch):
    """torch says that by an error of its own, a RuntimeError."""
    full = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    monkeypatch.setattr(
        "powerinfer_toolkit.recipes.verify.torch_side.TorchSide.logits", _fail(full)
    )
    done = run_command(pi_verify, capsys, sparse, predicted, "-f", text, "--max_length", "64")
    assert (done.code, done.out) == (3, "")
    assert "error: out of GPU memory" in done.err
    assert "Traceback" not in done.err


def _fail(failure: Exception) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise failure

    return fail


def test_distance_and_loss_are_what_they_say(monkeypatch):
    """Against the definitions in parity.closeness; the wider vocabulary's padding is left out."""
    monkeypatch.setattr("powerinfer_toolkit.recipes.verify.distance.AT_ONCE", 7)
    rng = np.random.default_rng(0)
    want = rng.standard_normal((40, 50)).astype(np.float32)
    got = want + 0.01 * rng.standard_normal(want.shape).astype(np.float32)
    got[3, 0] = 9.0  # one likeliest token swapped far beyond the error
    distance = Distance(tolerance=0.01, deviations=6)
    padded = np.concatenate([got, np.full((40, 3), 99.0, np.float32)], axis=1)
    for rows in (slice(20), slice(20, None)):
        distance.add(torch.from_numpy(padded[rows]), torch.from_numpy(want[rows]))
    assert distance.relative_l2 == pytest.approx(relative_l2(got, want))
    assert distance.kl == pytest.approx(mean_kl(got, want))
    assert distance.swaps == 1
    assert distance.to_record()["top1_agreement"] <= 39 / 40
    loss, tokens = Loss(), rng.integers(0, 50, 40)
    loss.add(torch.from_numpy(want), tokens)
    logprobs = want - np.log(np.exp(want.astype(np.float64)).sum(axis=1, keepdims=True))
    mean = -logprobs[np.arange(39), tokens[1:]].mean()
    assert loss.perplexity("x") == pytest.approx(np.exp(mean))
    broken = Loss()
    broken.add(torch.full((2, 3), np.nan), np.array([0, 1]))
    with pytest.raises(PiError, match="nan under x"):
        broken.perplexity("x")
