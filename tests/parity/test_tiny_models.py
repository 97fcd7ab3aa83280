"""Tiny random models by way of the user: save_pretrained, pi-convert, Model.load; against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from parity import checkpoints
from parity.closeness import relative_l2
from parity.reference import Reference
from parity.steps import decode, random_tokens
from powerinfer_toolkit.convert.cli import main as pi_convert
from powerinfer_toolkit.runtime import Model

# F32: both sides sum in float32, eps x sqrt(n) x depth is about 1e-6; F16: weights round at 2^-12 on average
# (2.4e-4), KV and embedding too, and a dozen such matrices add up in squares.
AGAINST_TRANSFORMERS = {"f32": 1e-5, "f16": 2e-3}
# Against the float64 reference on the file's own dequantised numbers only float32 sums differ.
AGAINST_DEQUANTISED = 1e-4
N_TOKENS = (
    40  # beyond the prediction tier and the step size below which rows are multiplied one by one
)


def convert(case: str, outtype: str, folder: Path) -> tuple[Any, Path]:
    model = checkpoints.tiny_model(case)
    source = checkpoints.save_checkpoint(model, folder / "checkpoint")
    path = folder / f"{outtype}.gguf"
    assert pi_convert([str(source), str(path), "--outtype", outtype]) == 0
    return model, path


@pytest.mark.parametrize("outtype", AGAINST_TRANSFORMERS)
@pytest.mark.parametrize("case", checkpoints.CASES)
def test_logits_equal_transformers(case, outtype, tmp_path):
    hf_model, path = convert(case, outtype, tmp_path)
    tokens = random_tokens(hf_model.config.vocab_size, N_TOKENS)
    want = checkpoints.torch_logits(hf_model, tokens)
    with Model.load(path, threads=2, ffn="dense") as model:
        assert relative_l2(model.logits(tokens), want) <= AGAINST_TRANSFORMERS[outtype]
        assert relative_l2(decode(model, tokens), want) <= AGAINST_TRANSFORMERS[outtype]


@pytest.mark.parametrize(
    ("case", "outtype"),
    [
        ("gqa", "bf16"),
        ("gqa", "q8_0"),
        ("relu_blocks", "q8_0"),
        ("gqa", "q4_0"),
        ("relu_blocks", "q4_0"),
    ],
)
def test_converted_types_equal_their_dequantised_reference(case, outtype, tmp_path):
    hf_model, path = convert(case, outtype, tmp_path)
    tokens = random_tokens(hf_model.config.vocab_size, N_TOKENS)
    want = Reference.load(path).logits(tokens)
    with Model.load(path, threads=2, kv_type="f32", activation_type="f32") as model:
        assert relative_l2(model.logits(tokens), want) <= AGAINST_DEQUANTISED
        assert relative_l2(decode(model, tokens), want) <= AGAINST_DEQUANTISED


@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_older_rope_scaling_spelling(factor, tmp_path):
    """config.json as transformers before 5 wrote it: rope_theta and rope_scaling beside each other."""
    hf_model = checkpoints.tiny_model("rope_linear")
    hf_model.config.rope_parameters["factor"] = factor
    source = checkpoints.save_checkpoint(hf_model, tmp_path / "checkpoint")
    config = json.loads((source / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "linear", "factor": factor}
    (source / "config.json").write_text(json.dumps(config))
    reloaded = checkpoints.load_checkpoint(source)
    path = tmp_path / "f32.gguf"
    assert pi_convert([str(source), str(path), "--outtype", "f32"]) == 0
    tokens = random_tokens(hf_model.config.vocab_size, N_TOKENS)
    with Model.load(path) as model:
        want = checkpoints.torch_logits(reloaded, tokens)
        assert relative_l2(model.logits(tokens), want) <= AGAINST_TRANSFORMERS["f32"]
