"""Prompts on a matrix unit, or on its emulation: a library of the preset asan has the latter (about 3 s)."""

from __future__ import annotations

import numpy as np
import pytest

from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.engine import Batch
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.synth.shapes import SHAPES
from powerinfer_toolkit.runtime.synth.write import SynthSettings, write_synth

UNITS = [
    name for name, usable in native_lib.instruction_sets() if usable and name.startswith("amx")
]
N_TOKENS = 41  # of a panel of 32 and one that is not full


def prompt_logits(path, isa: str, activation_type: str, n_tokens: int = N_TOKENS):
    """Logits of every token of a prompt [n_tokens, n_vocab]."""
    tokens = np.random.default_rng(0).integers(3, SHAPES["tiny"].n_vocab, n_tokens)
    settings = {"threads": 2, "context": 64, "batch": 64, "ffn": "dense"}
    with Model.load(path, isa=isa, activation_type=activation_type, **settings) as model:
        model.engine.run(Batch(tokens, want_logits=True))
        return model.engine.logits()


def distance(a, b) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.skipif(not UNITS, reason="no AMX, and a library without its emulation")
@pytest.mark.parametrize("dense_twin", [False, True])  # down_t, ffn_down
@pytest.mark.parametrize("outtype", ["q8_0", "q4_0", "q4_k"])
def test_prompts_are_closer_than_with_int8_activations(tmp_path, outtype, dense_twin):
    path = tmp_path / "model.gguf"
    kind = TensorType[outtype.upper()]
    write_synth(SynthSettings("tiny", path, kind, n_layers=2, dense_twin=dense_twin))
    wanted = prompt_logits(path, "scalar", "f32")
    for isa in UNITS:
        assert distance(prompt_logits(path, isa, "f32"), wanted) < 1e-5  # no rounding
        # bfloat16 rounds by 2^-9 at most and by 2^-9 / sqrt(3) in the mean, either factor; int8 blocks of normal
        # numbers by 1/127 of their largest, 2.2 deviations: three times as much.
        rounded = distance(prompt_logits(path, isa, "q8_0"), wanted)
        int8 = distance(prompt_logits(path, "scalar", "q8_0", 4), wanted[:4])
        assert 1e-5 < rounded < int8
