"""The numpy reference itself against transformers in float64, on files that gguf-py wrote."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parity import checkpoints
from parity.closeness import relative_l2
from parity.reference import Reference, round_to_int8
from parity.synthetic import write_gguf

# The file holds the model's float32 numbers and both sides multiply in float64, but transformers keeps
# norms, softmax and rope angles in float32: a few roundings of 6e-8 a layer (1.2e-7 seen in sum).
TOLERANCE = 1e-6


def _keys(config: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {"powerinfer.activation": config.hidden_act}
    rope = config.rope_parameters
    keys["llama.rope.freq_base"] = float(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        keys |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": rope["factor"]}
    if getattr(config, "sliding_window", None):
        keys["llama.attention.sliding_window"] = config.sliding_window
    return keys


@pytest.mark.parametrize("case", checkpoints.CASES)
def test_reference_equals_transformers(case, tmp_path):
    model = checkpoints.tiny_model(case)
    config = model.config
    weights = checkpoints.gguf_weights(model)
    if config.rope_parameters["rope_type"] == "llama3":
        weights["rope_freqs.weight"] = checkpoints.rope_factors(model)
    path = write_gguf(
        tmp_path / "tiny.gguf", checkpoints.shape_of(config), weights, keys=_keys(config)
    )
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 40).tolist()
    want = checkpoints.torch_logits(model.double(), tokens)
    assert relative_l2(Reference.load(path).logits(tokens), want) < TOLERANCE


def test_int8_rounding_stays_within_half_a_step():
    x = np.random.default_rng(2).standard_normal((5, 96))
    step = np.abs(x.reshape(5, 3, 32)).max(axis=-1) / 127
    error = np.abs(round_to_int8(x) - x).reshape(5, 3, 32).max(axis=-1)
    assert (error <= step * 0.500001).all()
    assert (error > step * 0.3).any()
