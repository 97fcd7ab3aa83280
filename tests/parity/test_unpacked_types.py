"""The types without vector code of their own: Q5_0, Q5_1, K-quants, IQ4_NL, MXFP4, NVFP4."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity import native_kernels as kernels
from parity.closeness import relative_l2
from parity.kernel_checks import (
    U,
    assert_bits_equal,
    assert_within,
    every_isa,
    normal,
    quantise_activations,
)
from parity.native_kernels import QUANTISED_TYPES
from parity.reference import Reference
from parity.steps import decode, random_tokens
from parity.synthetic import Shape, random_weights, without_predictors, write_gguf
from parity.unpacked_rows import HALVES, QUANTS, minima, random_rows
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.runtime import Model

TYPES = [kind for kind in HALVES if kind not in QUANTISED_TYPES]
every_type = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
N_COLS = 768


@every_isa
@every_type
def test_dequantize_equals_gguf_py_bit_for_bit(isa, kind):
    rows = random_rows(kind)
    want = kernels.dequantise(rows, kind)
    elements = gguf.GGML_QUANT_SIZES[kind][0]
    for row, values in zip(rows, want, strict=True):
        assert_bits_equal(kernels.dequantize(isa, kind, row, 0, N_COLS), values)
        part = kernels.dequantize(isa, kind, row, elements, elements + 5)
        assert_bits_equal(part, values[elements : 2 * elements + 5])


@every_isa
@every_type
def test_dot_and_axpy(isa, kind):
    rows, x = random_rows(kind), normal(N_COLS)
    w = kernels.dequantise(rows, kind).astype(np.float64)
    bound = (N_COLS + 2) * U * (np.abs(w) @ np.abs(x))
    got = kernels.dot_rows(isa, kind, rows, x)
    assert_within(got, w @ x, bound)
    index = np.array([3, 0, 7], np.int32)
    assert_bits_equal(kernels.dot_rows(isa, kind, rows, x, index), got[index])

    coef = np.array([0.5, 0, -2], np.float32)
    y = normal(N_COLS)
    summed = kernels.axpy_rows(isa, kind, rows, coef, N_COLS, y, index=index)
    terms = np.abs(coef) @ np.abs(w[index]) + np.abs(y)
    assert_within(summed, y + coef @ w[index], (len(coef) + 2) * U * terms)
    begin = 256
    part = kernels.axpy_rows(isa, kind, rows, coef, N_COLS, y[begin:512], begin, index)
    assert_bits_equal(part, summed[begin:512])


INT8_TYPES = [kind for kind in QUANTS if kind not in QUANTISED_TYPES]
int8_types = pytest.mark.parametrize("kind", INT8_TYPES, ids=lambda kind: kind.name)


def n_sums(isa: str) -> int:
    """Terms of a row's longest sum: the reference adds element by element, vectors by sub-block."""
    return N_COLS if isa == "scalar" else N_COLS // 16


@every_isa
@int8_types
def test_dot_q8(isa, kind):
    """A value is scale * q + minimum, and so is its product: integers are exact, scaling and the sums over
    sub-blocks of 16 or 32 round, some 8 operations besides the sum."""
    rows, x = random_rows(kind), normal(N_COLS) * np.repeat(np.float32(2) ** np.arange(-12, 12), 32)
    w, low = kernels.dequantise(rows, kind).astype(np.float64), minima(rows, kind)
    xq, xd = quantise_activations(x)
    rounded = (xq * xd[:, None].astype(np.float64)).ravel()
    magnitude = (np.abs(w - low) + np.abs(low)) @ np.abs(rounded)
    got = kernels.dot_rows(isa, kind, rows, x, activation=Type.Q8_0)
    assert_within(got, w @ rounded, (n_sums(isa) + 8) * U * magnitude)
    index = np.array([8, 3, 0, 7, 7, 1], np.int32)
    gathered = kernels.dot_rows(isa, kind, rows, x, index, activation=Type.Q8_0)
    assert_bits_equal(gathered, got[index])


@every_isa
@int8_types
def test_dot_q8_extremes(isa, kind):
    """The largest quants against the largest activations of one sign overflow nowhere; a NaN stays one."""
    rows = random_rows(kind, n_rows=5)
    blocks = rows.reshape(5, -1, gguf.GGML_QUANT_SIZES[kind][1])
    blocks[..., QUANTS[kind] or slice(-16, None)] = 0xFF
    w = kernels.dequantise(rows, kind).astype(np.float64)
    for sign in (1, -1):
        x = np.full(N_COLS, sign, np.float32)
        got = kernels.dot_rows(isa, kind, rows, x, activation=Type.Q8_0)
        magnitude = (np.abs(w - minima(rows, kind)) + np.abs(minima(rows, kind))) @ np.abs(x)
        # d = 1/127 rounded: one relative U more
        assert_within(got, w @ x, (n_sums(isa) + 9) * U * magnitude)
    x[40] = np.nan
    got = kernels.dot_rows(isa, kind, rows, x, activation=Type.Q8_0)
    assert np.isnan(got).all()


def test_int8_activations_are_refused():
    kind = Type.NVFP4
    with pytest.raises(UsageError, match="activation_type"):
        kernels.dot_rows("scalar", kind, random_rows(kind), normal(N_COLS), activation=Type.Q8_0)


SHAPE = Shape(n_embd=256, n_ff=300, n_heads=8, n_kv_heads=2, head_dim=32)
PROMPT = random_tokens(SHAPE.n_vocab, 24)
FLOAT = {"threads": 2, "kv_type": "f32", "activation_type": "f32"}
WRITABLE = [kind for kind in TYPES if kind is not Type.NVFP4]  # no quantiser writes it well enough


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda kind: kind.name)
def test_every_ffn_mode_of_a_model(kind, tmp_path):
    """All matrices in the type, down_t too, where upstream gives NaN or zeros. Only float32 sums differ from the
    float64 reference on the same stored numbers: eps x sqrt(n) x depth, some 1e-6.
    """
    weights = without_predictors(random_weights(SHAPE, 0))
    path = write_gguf(
        tmp_path / "m.gguf",
        SHAPE,
        weights,
        type_of=lambda name: kind if name.startswith("blk") else Type.F32,
        keys={"powerinfer.activation": "relu"},
    )
    want = Reference.load(path).logits(PROMPT)
    for ffn in ("dense", "exact"):
        with Model.load(path, **FLOAT, ffn=ffn) as model:
            assert relative_l2(model.logits(PROMPT), want) <= 1e-4
            assert relative_l2(decode(model, PROMPT), want) <= 1e-4
    # A reference that rounds alike agrees to 5e-7, until a float32 sum tips a value over to the next integer: a
    # step of 1/127 of its block's peak, 1.2e-3 of a vector of 256, which later tokens see through the KV cache.
    # Some 40,000 values within 1e-6 of a step make a few of them.
    alike = Reference.load(path, int8_activations=True).logits(PROMPT)
    assert relative_l2(alike, want) > 7e-3
    with Model.load(path, threads=2, kv_type="f32") as model:
        assert relative_l2(decode(model, PROMPT), alike) <= 5e-3
