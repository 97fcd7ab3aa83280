"""Sizes and keys at the edges, against the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity.closeness import relative_l2
from parity.predictors import clear_masks
from parity.reference import Reference
from parity.steps import decode, random_tokens, run_chunks
from parity.synthetic import (
    Shape,
    all_float32,
    dense_layout,
    random_weights,
    uniform,
    without_predictors,
    write_gguf,
)
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime import Model

RELU = {"powerinfer.activation": "relu"}
# Float32 sums on the engine's side alone: eps x sqrt(n) x depth; angles of 40 radians round at 2e-6.
TOLERANCE = 1e-5
TINY = Shape()
SHAPES = {
    "one_layer": replace(TINY, n_layers=1),
    "one_neuron": replace(TINY, n_ff=1),
    "31_neurons": replace(TINY, n_ff=31),
    "33_neurons": replace(TINY, n_ff=33),
    "more_neurons_than_16_groups_of_32": replace(TINY, n_ff=16 * 32 + 5),
    "narrow": replace(TINY, n_embd=6, n_heads=1, n_kv_heads=1, head_dim=6),
    "head_of_two": replace(TINY, n_heads=3, n_kv_heads=3, head_dim=2),
    "head_of_66": replace(TINY, n_heads=2, n_kv_heads=1, head_dim=66),
    "head_of_256": replace(TINY, n_heads=2, n_kv_heads=1, head_dim=256),
    "36_heads_on_one": replace(TINY, n_heads=36, n_kv_heads=1, head_dim=8),
    "wide": replace(TINY, n_embd=1000, n_ff=40),
    "tied": replace(TINY, tied=True),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
@pytest.mark.parametrize("type_", [Type.F32, Type.F16], ids=lambda t: t.name)
def test_shapes(type_, layout, name, tmp_path):
    shape = SHAPES[name]
    weights = random_weights(shape, 0)
    if layout == "dense":
        weights = dense_layout(weights)
    keys = RELU if layout == "sparse" else {}
    path = write_gguf(tmp_path / "m.gguf", shape, weights, type_of=uniform(type_), keys=keys)
    prompt = random_tokens(shape.n_vocab, 40)
    want = Reference.load(path).logits(prompt)
    with Model.load(path, threads=3, kv_type="f32") as model:
        assert relative_l2(model.logits(prompt), want) <= TOLERANCE
        assert relative_l2(decode(model, prompt), want) <= TOLERANCE


@pytest.mark.parametrize("type_", [Type.Q8_0, Type.Q4_0, Type.Q4_1], ids=lambda t: t.name)
def test_one_block(type_, tmp_path):
    shape = replace(TINY, n_embd=32, n_heads=1, n_kv_heads=1, head_dim=32, n_ff=32)
    weights = dense_layout(random_weights(shape, 0))
    path = write_gguf(tmp_path / "m.gguf", shape, weights, type_of=uniform(type_))
    prompt = random_tokens(shape.n_vocab, 20)
    with Model.load(path, threads=3, activation_type="f32") as model:
        want = Reference.load(path).logits(prompt)
        assert relative_l2(model.logits(prompt), want) <= TOLERANCE
    with Model.load(path, threads=3, kv_type="f32") as model:
        alike = Reference.load(path, int8_activations=True).logits(prompt)
        # one value of the only block that tips over is 1/127 of the block's peak, 3e-3 of the vector, and a
        # few tokens see it
        assert relative_l2(decode(model, prompt), alike) <= 1e-2


def test_part_of_a_head_turns(tmp_path):
    """rope.dimension_count below the head's size: the other dimensions stay as they are."""
    weights = dense_layout(random_weights(TINY, 0))
    path = write_gguf(tmp_path / "m.gguf", TINY, weights, n_rot=10)
    prompt = random_tokens(TINY.n_vocab, 40)
    want = Reference.load(path).logits(prompt)
    with Model.load(path) as model:
        assert relative_l2(model.logits(prompt), want) <= TOLERANCE


@pytest.mark.parametrize("window", [1, 31, 32, 33, 70])
def test_sliding_windows(window, tmp_path):
    keys = {"llama.attention.sliding_window": window}
    path = write_gguf(tmp_path / "m.gguf", TINY, dense_layout(random_weights(TINY, 0)), keys=keys)
    prompt = random_tokens(TINY.n_vocab, 130)
    want = Reference.load(path).logits(prompt)
    with Model.load(path, threads=2) as model:
        assert relative_l2(model.logits(prompt), want) <= TOLERANCE
        assert relative_l2(decode(model, prompt), want) <= TOLERANCE
        model.engine.kv_truncate(0, 0)
        assert relative_l2(run_chunks(model, prompt, 37), want) <= TOLERANCE


def test_long_contexts(tmp_path):
    """Decoding splits a long context in spans of pages, prompts go through in passes: the same sums."""
    shape = replace(TINY, n_layers=1, n_ctx=2048)
    path = write_gguf(tmp_path / "m.gguf", shape, dense_layout(random_weights(shape, 0)))
    prompt = random_tokens(shape.n_vocab, 1200)
    want = Reference.load(path).logits(prompt)
    with Model.load(path, threads=2, batch=2048) as model:
        whole = model.logits(prompt)
        # rope angles of 1200 radians are rounded to float32 as transformers does: 6e-8 x 1200 = 7e-5 at most
        assert relative_l2(whole, want) <= 1e-4
        model.engine.kv_truncate(0, 1000)
        assert relative_l2(run_chunks(model, prompt[1000:1040], 1), whole[1000:1040]) <= TOLERANCE
        assert relative_l2(run_chunks(model, prompt[1040:1100], 3), whole[1040:1100]) <= TOLERANCE


def test_a_raised_activation_threshold(tmp_path):
    """FATReLU: a neuron fires iff its gate is above the threshold, and then with its whole gate."""
    weights = without_predictors(random_weights(TINY, 0))
    raised = RELU | {"powerinfer.activation_threshold": 0.5}
    path = write_gguf(tmp_path / "m.gguf", TINY, weights, keys=raised)
    plain = write_gguf(tmp_path / "plain.gguf", TINY, weights, keys=RELU)
    prompt = random_tokens(TINY.n_vocab, 24)
    want = Reference.load(path).logits(prompt)
    assert relative_l2(Reference.load(plain).logits(prompt), want) > 0.1
    for ffn in ("dense", "exact"):
        with Model.load(path, ffn=ffn) as model:
            assert relative_l2(model.logits(prompt), want) <= TOLERANCE
            assert relative_l2(decode(model, prompt), want) <= TOLERANCE


@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_sink_positions(sinks, tmp_path):
    shape = replace(TINY, ranks=(8, 24))
    prompt = random_tokens(shape.n_vocab, 14)
    masked = np.arange(len(prompt)) >= sinks
    weights = random_weights(shape, 0)
    scratch = tmp_path / "scratch"
    clear_masks(scratch, shape, weights, all_float32, prompt, masked, margin=0.02)
    keys = RELU | {"powerinfer.sink_positions": sinks}
    path = write_gguf(tmp_path / "m.gguf", shape, weights, keys=keys)
    want = Reference.load(path).logits(prompt, masked=masked)
    with Model.load(path, ffn="predicted") as model:
        assert relative_l2(model.logits(prompt), want) <= TOLERANCE
        assert relative_l2(decode(model, prompt), want) <= TOLERANCE


def test_exact_layers_are_not_masked(tmp_path):
    """powerinfer.predictor.exact_layers: layers whose predictor costs too much stay exact."""
    shape = replace(TINY, ranks=(8, 24))
    prompt = random_tokens(shape.n_vocab, 14)
    masked = np.arange(len(prompt)) > 0
    weights = random_weights(shape, 0)
    keys = RELU | {"powerinfer.predictor.exact_layers": [True, False]}
    scratch = tmp_path / "scratch"
    clear_masks(
        scratch,
        shape,
        weights,
        all_float32,
        prompt,
        masked,
        margin=0.02,
        exact_layers=(True, False),
    )
    path = write_gguf(tmp_path / "m.gguf", shape, weights, keys=keys)
    want = Reference.load(path).logits(prompt, masked=masked)
    with Model.load(path, ffn="predicted") as model:
        assert relative_l2(decode(model, prompt), want) <= TOLERANCE
    keys["powerinfer.predictor.exact_layers"] = [True]
    wrong = write_gguf(tmp_path / "wrong.gguf", shape, weights, keys=keys)
    with pytest.raises(PiError, match="exact_layers"):
        Model.load(wrong)
