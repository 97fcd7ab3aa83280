"""Products of the device library against float64 products of the values that the scalar kernels read.

Bounds: float32 sums of n products, a lane's run and then a tree, are within (n / 32 + 40) u of the sum of their
magnitudes, u = 2^-24. On the matrix units both factors are rounded to float16 first: 2 * 2^-11, and 2^-25 for
what is subnormal there.
"""

from __future__ import annotations

import ctypes as ct

import numpy as np
import pytest

from gpu.blocks import random_rows, values_of
from gpu.device import KERNEL_TYPES, TYPES, Device, DeviceError, List, Product, Rows

UNIT = 2.0**-24
HALF_UNIT = 2.0**-11
TINY_HALF = 2.0**-25


def close(got: np.ndarray, weights: np.ndarray, x: np.ndarray, halves: bool = False) -> None:
    """Hold got [n_tokens, n_rows] against x [n_tokens, n] . weights [n_rows, n]^T."""
    w64, x64 = weights.astype(np.float64), x.astype(np.float64)
    magnitude = np.abs(x64) @ np.abs(w64).T
    bound = (x.shape[-1] / 32 + 40) * UNIT * magnitude
    if halves:
        tiny = np.abs(x64).sum(-1)[..., None] + np.abs(w64).sum(-1)
        bound = bound + 2.1 * HALF_UNIT * magnitude + TINY_HALF * tiny
    error = np.abs(got - x64 @ w64.T)
    worst = np.unravel_index(np.nanargmax(error / (bound + 1e-30)), error.shape)
    assert np.isfinite(got).all(), f"{np.isnan(got).sum()} of {got.size} elements are not numbers"
    assert (error <= bound + 1e-30).all(), (
        f"element {worst}: error {error[worst]}, bound {bound[worst]}"
    )


def some_x(n_tokens: int, n: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n_tokens, n)).astype(np.float32)


def multiply(
    device: Device, rows: list[Rows], x: np.ndarray, bias: list[int | None]
) -> list[np.ndarray]:
    outs = [device.poisoned((len(x), r.n_rows)) for r in rows]
    products = (Product * len(rows))(
        *(Product(r, b, o) for r, b, o in zip(rows, bias, outs, strict=True))
    )
    device.multiply(products, len(rows), device.put(x), len(x))
    return [device.get(o, (len(x), r.n_rows)) for r, o in zip(rows, outs, strict=True)]


@pytest.mark.parametrize("kind", TYPES)
def test_rows_are_fetched_as_the_scalar_kernels_read_them(device: Device, kind: str) -> None:
    n_cols = 768
    data = random_rows(kind, 5, n_cols, seed=3)
    rows = device.rows(kind, data, n_cols)
    tokens = np.array([4, 0, 3, 3], np.int32)
    out = device.poisoned((4, n_cols))
    device.fetch_rows(ct.byref(rows), device.put(tokens), 4, out)
    want = values_of(kind, data, n_cols)[tokens]
    # One rounding where the device fuses a product and a sum.
    np.testing.assert_allclose(
        device.get(out, (4, n_cols)), want, rtol=1e-6, atol=np.abs(want).max() * 2e-7
    )


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4, 7, 8, 11])
@pytest.mark.parametrize("kind", TYPES)
def test_few_vectors(device: Device, kind: str, n_tokens: int) -> None:
    n_rows, n_cols = 37, 1280
    data = random_rows(kind, n_rows, n_cols, seed=5)
    x = some_x(n_tokens, n_cols)
    (got,) = multiply(device, [device.rows(kind, data, n_cols)], x, [None])
    close(got, values_of(kind, data, n_cols), x)


@pytest.mark.parametrize("n_cols", [32, 64, 576, 1536, 8192, 11008])
@pytest.mark.parametrize("kind", ["Q4_0", "F16", "Q8_0"])
def test_row_lengths(device: Device, kind: str, n_cols: int) -> None:
    data = random_rows(kind, 19, n_cols, seed=6)
    for n_tokens in (1, 8):
        x = some_x(n_tokens, n_cols, seed=n_cols)
        (got,) = multiply(device, [device.rows(kind, data, n_cols)], x, [None])
        close(got, values_of(kind, data, n_cols), x)


def test_several_products_of_mixed_types_with_biases(device: Device) -> None:
    n_cols, kinds, sizes = 512, ("Q4_K", "Q6_K", "Q4_K", "F16"), (48, 16, 33, 5)
    data = [random_rows(k, n, n_cols, seed=n) for k, n in zip(kinds, sizes, strict=True)]
    rows = [device.rows(k, d, n_cols) for k, d in zip(kinds, data, strict=True)]
    for n_tokens in (1, 3, 40):
        x = some_x(n_tokens, n_cols, seed=n_tokens)
        bias = [some_x(1, n, seed=n)[0] for n in sizes]
        got = multiply(device, rows, x, [device.put(b) for b in bias])
        for i in range(len(kinds)):
            close(got[i] - bias[i], values_of(kinds[i], data[i], n_cols), x, halves=True)


@pytest.mark.parametrize("n_tokens", [17, 64, 130])
@pytest.mark.parametrize("kind", TYPES)
def test_many_vectors_on_the_matrix_units(device: Device, kind: str, n_tokens: int) -> None:
    n_rows, n_cols = 145, 512
    data = random_rows(kind, n_rows, n_cols, seed=7)
    x = some_x(n_tokens, n_cols)
    (got,) = multiply(device, [device.rows(kind, data, n_cols)], x, [None])
    close(got, values_of(kind, data, n_cols), x, halves=kind != "F32")


def test_activations_beyond_float16_are_scaled(device: Device) -> None:
    n_cols = 64
    data = random_rows("F16", 40, n_cols, seed=8)
    x = some_x(32, n_cols) * np.float32(3e6)
    (got,) = multiply(device, [device.rows("F16", data, n_cols)], x, [None])
    scale = np.float32(2.0**10)  # so that the bound's subnormal term stays small beside the rest
    close(got / scale, values_of("F16", data, n_cols), x / scale, halves=True)


@pytest.mark.parametrize("n_tokens", [1, 3, 40])
@pytest.mark.parametrize("kind", TYPES)
def test_transposed_products(device: Device, kind: str, n_tokens: int) -> None:
    n_rows, n_cols = 150, 1280  # rows that are no multiple of a tile's depth
    data = random_rows(kind, n_rows, n_cols, seed=9)
    h = some_x(n_tokens, n_rows)
    h[np.abs(h) < 0.5] = 0
    rows, out = device.rows(kind, data, n_cols), device.poisoned((n_tokens, n_cols))
    device.multiply_transposed(ct.byref(rows), device.put(h), n_tokens, out)
    close(
        device.get(out, (n_tokens, n_cols)),
        values_of(kind, data, n_cols).T,
        h,
        halves=n_tokens > 16,
    )


def listed(
    device: Device, index: np.ndarray, capacity: int, value: np.ndarray | None = None
) -> List:
    """A list with rubbish beyond its length."""
    padded = np.full(capacity, 2**30, np.int32)
    padded[: len(index)] = index
    values = None
    if value is not None:
        values = np.full(capacity, np.nan, np.float32)
        values[: len(index)] = value
        values = device.put(values)
    return List(device.put(padded), values, device.put(np.array([len(index)], np.uint32)))


@pytest.mark.parametrize("n_listed", [0, 1, 16, 17, 61])
@pytest.mark.parametrize("kind", TYPES)
def test_products_and_sums_of_listed_rows(device: Device, kind: str, n_listed: int) -> None:
    n_rows, n_cols = 96, 512
    data = random_rows(kind, n_rows, n_cols, seed=10)
    weights, rows = values_of(kind, data, n_cols), device.rows(kind, data, n_cols)
    rng = np.random.default_rng(n_listed)
    index = np.sort(rng.choice(n_rows, n_listed, replace=False)).astype(np.int32)
    value = rng.standard_normal(n_listed).astype(np.float32)
    x = some_x(1, n_cols)
    out = device.poisoned(n_rows)
    device.multiply_listed(
        ct.byref(rows), ct.byref(listed(device, index, n_rows, value)), device.put(x), out
    )
    got = device.get(out, n_rows)
    if n_listed:
        close(got[None, :n_listed] / value, weights[index], x)
    assert np.isnan(got[n_listed:]).all(), "wrote beyond the list"

    coef = np.full(n_rows, np.nan, np.float32)
    coef[:n_listed] = value
    total = device.poisoned(n_cols)
    device.accumulate_listed(
        ct.byref(rows), ct.byref(listed(device, index, n_rows)), device.put(coef), total
    )
    close(device.get(total, (1, n_cols)), weights[index].T, value[None])


def test_sums_of_rows_have_the_same_bits_every_time(device: Device) -> None:
    data = random_rows("Q4_0", 700, 1024, seed=11)
    rows, h = device.rows("Q4_0", data, 1024), device.put(some_x(1, 700))
    outs = []
    for _ in range(2):
        out = device.poisoned(1024)
        device.multiply_transposed(ct.byref(rows), h, 1, out)
        outs.append(device.get(out, 1024))
    np.testing.assert_array_equal(outs[0], outs[1])


def test_what_the_kernels_do_not_take_is_refused(device: Device) -> None:
    assert device.api.row_stride(KERNEL_TYPES["F16"], 48) == 0
    assert device.api.row_stride(KERNEL_TYPES["Q4_K"], 288) == 0
    assert device.api.row_stride(99, 256) == 0
    with pytest.raises(DeviceError, match="multiples of 32"):
        device.fetch_rows(ct.byref(Rows(1, 16, 1, 48, 1)), 1, 1, 1)
