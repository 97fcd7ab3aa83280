"""Every tensor type in every role, against the float64 reference on gguf-py's dequantised numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity.closeness import relative_l2
from parity.predictors import clear_masks
from parity.reference import Reference
from parity.steps import decode, random_tokens
from parity.synthetic import (
    Shape,
    TypeOf,
    all_float32,
    dense_layout,
    random_weights,
    uniform,
    without_predictors,
    write_gguf,
)
from powerinfer_toolkit.runtime import Model, native_lib

TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1]
QUANTISED = [Type.Q8_0, Type.Q4_0, Type.Q4_1]
SHAPE = Shape(ranks=(32, 64), n_ff=163)  # rows need no whole blocks: 163 neurons are 5 blocks and 3
DENSE_SHAPE = Shape()
RELU = {"powerinfer.activation": "relu"}
PROMPT = random_tokens(SHAPE.n_vocab, 24)  # long enough for the product that dequantises tiles
MASKED = np.arange(len(PROMPT)) > 0
# With float32 activations and KV only float32 sums differ: eps x sqrt(n) x depth, some 1e-6.
FLOAT = {"threads": 2, "kv_type": "f32", "activation_type": "f32"}
FLOAT_TOLERANCE = 1e-4
# Activations in int8 blocks of 32 (see round_to_int8) move logits by about 1% on this model. A reference that
# rounds alike differs only where the last bits of float32 sums tip a value over to the next integer: here not
# at all, or one or two of some 10,000 values by a step of 1/127 of their block's peak.
INT8_TOLERANCE = 4e-2
INT8_ALIKE_TOLERANCE = 5e-4
MARGIN = 0.05


def roles(name_part: str, type_: Type) -> TypeOf:
    return lambda name: type_ if name_part in name else Type.F32


def write_sparse(path: Path, type_of: TypeOf, seed: int = 0) -> Path:
    weights = random_weights(SHAPE, seed)
    scratch = path.with_suffix(".scratch")
    clear_masks(scratch, SHAPE, weights, type_of, PROMPT, MASKED, margin=MARGIN)
    return write_gguf(path, SHAPE, weights, type_of=type_of, keys=RELU)


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_dense_silu(type_, tmp_path):
    weights = dense_layout(random_weights(DENSE_SHAPE, 0))
    path = write_gguf(tmp_path / "m.gguf", DENSE_SHAPE, weights, type_of=uniform(type_))
    want = Reference.load(path).logits(PROMPT)
    with Model.load(path, **FLOAT) as model:
        assert relative_l2(model.logits(PROMPT), want) <= FLOAT_TOLERANCE
        assert relative_l2(decode(model, PROMPT), want) <= FLOAT_TOLERANCE


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("role", ["ffn_gate", "ffn_up", "ffn_down_t", "fc1", "fc2", "blk"])
def test_ffn_roles(role, type_, tmp_path):
    """One role at a time in each type, then ("blk") everything but embedding and head."""
    path = write_sparse(tmp_path / "m.gguf", roles(role, type_))
    reference = Reference.load(path)
    exact = reference.logits(PROMPT)
    for ffn in ("dense", "exact"):
        with Model.load(path, **FLOAT, ffn=ffn) as model:
            assert relative_l2(model.logits(PROMPT), exact) <= FLOAT_TOLERANCE
            assert relative_l2(decode(model, PROMPT), exact) <= FLOAT_TOLERANCE
    predicted = reference.logits(PROMPT, masked=MASKED)
    assert relative_l2(predicted, exact) > 0.1
    with Model.load(path, **FLOAT, ffn="predicted") as model:
        assert (
            relative_l2(model.logits(PROMPT), exact) <= FLOAT_TOLERANCE
        )  # beyond the prediction tier
        assert relative_l2(decode(model, PROMPT), predicted) <= FLOAT_TOLERANCE


@pytest.mark.parametrize("type_", QUANTISED, ids=lambda t: t.name)
def test_int8_activations(type_, tmp_path):
    weights = without_predictors(random_weights(SHAPE, 0))
    path = write_gguf(tmp_path / "m.gguf", SHAPE, weights, type_of=uniform(type_), keys=RELU)
    want = Reference.load(path).logits(PROMPT)
    alike = Reference.load(path, int8_activations=True).logits(PROMPT)
    assert relative_l2(alike, want) > 1e-3
    with Model.load(path, threads=2, kv_type="f32") as model:
        got = decode(model, PROMPT)
        assert relative_l2(got, want) <= INT8_TOLERANCE
        assert relative_l2(got, alike) <= INT8_ALIKE_TOLERANCE
        assert relative_l2(model.logits(PROMPT), want) <= INT8_TOLERANCE


def usable_isas() -> list[str]:
    return [name for name, usable in native_lib.instruction_sets() if usable]


def mixed_types(name: str) -> Type:
    """Each kernel of the table at work in one model."""
    by_role = {
        "attn_q": Type.Q4_0,
        "attn_k": Type.F16,
        "attn_v": Type.Q4_1,
        "attn_output": Type.BF16,
        "ffn_gate": Type.Q4_0,
        "ffn_up": Type.Q4_1,
        "ffn_down_t": Type.Q8_0,
        "fc1": Type.BF16,
        "fc2": Type.Q8_0,
        "token_embd": Type.Q8_0,
        "output": Type.F16,
    }
    return by_role.get(name.split(".")[-2], Type.F32)


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory):
    return write_sparse(tmp_path_factory.mktemp("mixed") / "m.gguf", mixed_types)


@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("how", ["argument", "environment"])
def test_every_instruction_set(how, isa, mixed_file, monkeypatch):
    if how == "environment":
        monkeypatch.setenv("PI_ISA", isa)
    asked = isa if how == "argument" else None
    reference = Reference.load(mixed_file)
    for ffn, masked in (("dense", None), ("exact", None), ("predicted", MASKED)):
        want = reference.logits(PROMPT, masked=masked)
        with Model.load(mixed_file, **FLOAT, ffn=ffn, isa=asked) as model:
            assert model.stats().isa == isa
            assert relative_l2(decode(model, PROMPT), want) <= FLOAT_TOLERANCE
            if masked is None:
                assert relative_l2(model.logits(PROMPT), want) <= FLOAT_TOLERANCE


def test_int8_of_every_instruction_set(mixed_file):
    alike = Reference.load(mixed_file, int8_activations=True).logits(PROMPT)
    for isa in usable_isas():
        with Model.load(mixed_file, threads=2, kv_type="f32", ffn="exact", isa=isa) as model:
            assert relative_l2(decode(model, PROMPT), alike) <= INT8_ALIKE_TOLERANCE


def test_the_kv_cache_in_float16(tmp_path):
    """K and V round to 2^-12 of their size on average (2.4e-4): a few such errors, never 1e-3."""
    weights = without_predictors(random_weights(SHAPE, 0))
    path = write_gguf(tmp_path / "m.gguf", SHAPE, weights, type_of=all_float32, keys=RELU)
    want = Reference.load(path).logits(PROMPT)
    with Model.load(path, kv_type="f16") as model:
        assert 1e-5 < relative_l2(model.logits(PROMPT), want) < 1e-3
