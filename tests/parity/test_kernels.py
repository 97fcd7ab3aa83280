"""Dequantisation, dot products and axpy of every instruction set against numpy float64 and gguf-py."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity import native_kernels as kernels
from parity.kernel_checks import (
    BLOCK,
    U,
    assert_bits_equal,
    assert_within,
    every_isa,
    normal,
    quantise_activations,
)
from parity.native_kernels import FLOAT_TYPES, QUANTISED_TYPES

TYPES = (*FLOAT_TYPES, *QUANTISED_TYPES)

every_type = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
quantised_types = pytest.mark.parametrize("kind", QUANTISED_TYPES, ids=lambda kind: kind.name)


def widths(kind: Type) -> tuple[int, ...]:
    """Row lengths: one block, blocks that fill no vector step, rows longer than the prefetch distance."""
    return (1, 7, 33, 64, 576, 1001, 4096) if kind in FLOAT_TYPES else (32, 96, 576, 4096)


def matrix(kind: Type, n_rows: int, n_cols: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Stored rows and the float64 values that gguf-py reads in them."""
    data = kernels.quantise(normal((n_rows, n_cols), seed), kind)
    return data, kernels.dequantise(data, kind).astype(np.float64)


# ---- dequantisation ------------------------------------------------------------------------------


@every_isa
@every_type
def test_dequantize_equals_gguf_py(isa: str, kind: Type) -> None:
    for n in widths(kind):
        data, want = matrix(kind, 1, n)
        assert_bits_equal(kernels.dequantize(isa, kind, data, 0, n), want[0].astype(np.float32))
        begin = n // 2 // BLOCK * BLOCK
        for size in {0, 1, min(37, n - begin), n - begin}:
            part = kernels.dequantize(isa, kind, data, begin, size)
            assert_bits_equal(part, want[0, begin : begin + size].astype(np.float32))


@every_isa
@quantised_types
def test_dequantize_any_bytes(isa: str, kind: Type) -> None:
    """Scales of either sign, zero and subnormal; every quant."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(2).integers(0, 256, (500, block_bytes), dtype=np.uint8)
    data[:, 1] &= 0xBF  # no infinite or NaN scale
    data[:, 3] &= 0xBF  # of Q4_1; in the other types one quant of many
    data[:20, 1] &= 0x83  # subnormal
    row = data.reshape(1, -1)
    want = kernels.dequantise(row, kind)[0]
    assert_bits_equal(kernels.dequantize(isa, kind, row, 0, len(want)), want)


@every_isa
@pytest.mark.parametrize("kind", [Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_dequantize_every_16_bit_pattern(isa: str, kind: Type) -> None:
    row = np.arange(1 << 16, dtype=np.uint16)
    want = kernels.dequantise(row.view(np.uint8)[None], kind)[0]
    got = kernels.dequantize(isa, kind, row, 0, len(row))
    number = ~np.isnan(want)
    assert_bits_equal(got[number], want[number])
    assert np.isnan(got[~number]).all()


# ---- dot products --------------------------------------------------------------------------------


@every_isa
@every_type
def test_dot_f32(isa: str, kind: Type) -> None:
    for n in widths(kind):
        data, w = matrix(kind, 9, n)
        x = normal(n)
        got = kernels.dot_rows(isa, kind, data, x)
        assert_within(got, w @ x, (n + 2) * U * (np.abs(w) @ np.abs(x)))


def split_blocks(data: np.ndarray, kind: Type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stored rows as integers q [n_rows, n_blocks, 32], scales d and offsets m: value = d q + m."""
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = data.reshape(len(data), -1, block_bytes)
    halves = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float64)
    d = halves[..., 0]
    if kind is Type.Q8_0:
        return blocks[..., 2:].view(np.int8).astype(np.int64), d, np.zeros_like(d)
    packed = blocks[..., -16:].astype(np.int64)
    q = np.concatenate([packed & 15, packed >> 4], axis=-1)
    return q, d, halves[..., 1] if kind is Type.Q4_1 else -8 * d


@every_isa
@quantised_types
def test_dot_q8(isa: str, kind: Type) -> None:
    """Integers are exact; scaling and the sum over blocks round: some 8 operations besides the sum."""
    for n in widths(kind):
        data, _ = matrix(kind, 9, n)
        x = normal(n)
        xq, xd = quantise_activations(x)
        q, d, m = split_blocks(data, kind)
        want = d * xd * (q * xq).sum(axis=-1) + m * xd * xq.sum(axis=-1)
        magnitude = np.abs(d * xd) * np.abs(q * xq).sum(axis=-1) + np.abs(m * xd * xq.sum(axis=-1))
        got = kernels.dot_rows(isa, kind, data, x, activation=Type.Q8_0)
        assert_within(got, want.sum(axis=1), (n // BLOCK + 8) * U * magnitude.sum(axis=1))


@every_isa
@quantised_types
def test_dot_q8_is_exact_where_float32_is(isa: str, kind: Type) -> None:
    """Scales that are powers of two and integer activations: nothing rounds, every bit is known."""
    n = 7 * BLOCK
    rng = np.random.default_rng(9)
    data = rng.integers(0, 256, (9, n // BLOCK, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    data[..., :2] = np.array([0.125], np.float16).view(np.uint8)
    if kind is Type.Q4_1:
        data[..., 2:4] = np.array([-0.75], np.float16).view(np.uint8)
    row = data.reshape(9, -1)
    x = rng.integers(-127, 128, n).astype(np.float32)
    x[::BLOCK] = 127  # the largest of each block: d = 1
    want = kernels.dequantise(row, kind).astype(np.float64) @ x
    got = kernels.dot_rows(isa, kind, row, x, activation=Type.Q8_0)
    assert_bits_equal(got, want.astype(np.float32))


@every_isa
def test_activations_are_quantised_alike(isa: str) -> None:
    """Rows with a single quant read back d * q of every activation; scalar is the reference."""
    n = 2 * BLOCK
    rows = np.zeros((n, n // BLOCK, 34), np.uint8)
    rows[..., :2] = np.array([1.0], np.float16).view(np.uint8)
    for i in range(n):
        rows[i, i // BLOCK, 2 + i % BLOCK] = 1
    x = normal(n) * np.float32(1e-3)
    x[5] = np.abs(x).max() * 2  # an extreme is hit exactly: +127
    x[BLOCK + 3] = -np.abs(x).max() * 3  # and -127, never -128
    q, d = quantise_activations(x)
    got = kernels.dot_rows(isa, Type.Q8_0, rows.reshape(n, -1), x, activation=Type.Q8_0)
    assert_bits_equal(got, (d[:, None] * q.astype(np.float32)).ravel())


@every_isa
@quantised_types
def test_dot_q8_extremes(isa: str, kind: Type) -> None:
    """The largest quants of either sign do not overflow; zero, tiny, infinite and NaN blocks."""
    n = 4 * BLOCK
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        data = np.full((5, n // BLOCK, block_bytes), byte, np.uint8)
        data[..., :2] = np.array([0.5], np.float16).view(np.uint8)
        if kind is Type.Q4_1:
            data[..., 2:4] = 0
        row = data.reshape(5, -1)
        w = kernels.dequantise(row, kind).astype(np.float64)
        for sign in (1, -1):
            x = np.full(n, sign, np.float32)
            got = kernels.dot_rows(isa, kind, row, x, activation=Type.Q8_0)
            # d = 1/127 rounded: one relative u, then the exact integers
            assert_within(got, w @ x, 8 * U * (np.abs(w) + 8) @ np.abs(x))
    for value, check in ((0.0, np.equal), (1e-42, np.equal), (np.inf, None), (np.nan, None)):
        x = np.zeros(n, np.float32)
        x[40] = value
        got = kernels.dot_rows(isa, kind, row, x, activation=Type.Q8_0)
        assert np.isnan(got).all() if check is None else check(got, 0).all()


@every_isa
@every_type
@pytest.mark.parametrize("activation", [Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
def test_a_row_does_not_depend_on_its_neighbours(isa: str, kind: Type, activation: Type) -> None:
    if activation is Type.Q8_0 and kind in FLOAT_TYPES:
        pytest.skip("float types take float activations")
    n_rows, n = 700, 96  # more rows than a list of the kernels holds
    data, _ = matrix(kind, n_rows, n)
    x = normal(n)
    whole = kernels.dot_rows(isa, kind, data, x, activation=activation)
    for first, n_part in ((0, 1), (1, 2), (5, 3), (7, 257), (300, 400)):
        part = kernels.dot_rows(isa, kind, data[first : first + n_part], x, activation=activation)
        assert_bits_equal(part, whole[first : first + n_part])
    rng = np.random.default_rng(3)
    for n_part in (0, 1, 6, 300, 900):
        index = rng.integers(0, n_rows, n_part)
        part = kernels.dot_rows(isa, kind, data, x, index, activation=activation)
        assert_bits_equal(part, whole[index])


# ---- axpy ----------------------------------------------------------------------------------------


@every_isa
@every_type
def test_axpy(isa: str, kind: Type) -> None:
    for n in widths(kind):
        data, w = matrix(kind, 11, n)
        coef, y = normal(11, seed=4), normal(n, seed=5)
        got = kernels.axpy_rows(isa, kind, data, coef, n, y)
        bound = 13 * U * (np.abs(coef) @ np.abs(w) + np.abs(y))
        assert_within(got, coef.astype(np.float64) @ w + y, bound)


@every_isa
@every_type
def test_axpy_is_one_sum_for_every_column(isa: str, kind: Type) -> None:
    """The order of rows alone decides: column ranges, gathering and zero coefficients change no bit."""
    n_rows, n = 900, 224
    data, _ = matrix(kind, n_rows, n)
    rng = np.random.default_rng(6)
    coef = np.where(rng.random(n_rows) < 0.6, 0, normal(n_rows, seed=7)).astype(np.float32)
    y = normal(n, seed=8)
    whole = kernels.axpy_rows(isa, kind, data, coef, n, y)
    for begin, end in ((0, 32), (32, 96), (96, 224)):
        part = kernels.axpy_rows(isa, kind, data, coef, n, y[begin:end], begin=begin)
        assert_bits_equal(part, whole[begin:end])
    index = np.flatnonzero(coef)
    assert_bits_equal(kernels.axpy_rows(isa, kind, data, coef[index], n, y, index=index), whole)
    step = y
    for i in index:
        step = kernels.axpy_rows(isa, kind, data, coef[i : i + 1], n, step, index=np.array([i]))
    assert_bits_equal(step, whole)


@every_isa
def test_axpy_of_zeros_leaves_every_bit(isa: str) -> None:
    data = np.full((6, 64), np.inf, np.float32)
    y = np.array([-0.0, 0.0, 1.0, -1e-45] * 16, np.float32)
    zeros = np.array([0.0, -0.0] * 3, np.float32)
    assert_bits_equal(kernels.axpy_rows(isa, Type.F32, data, zeros, 64, y), y)
