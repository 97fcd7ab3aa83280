"""Products of the device library against float64 products of the values that the scalar kernels read.

Bounds: float32 sums of n products, a lane's run and then a tree, are within (n / 32 + 40) u of the sum of their
magnitudes, u = 2^-24. A few vectors that meet quantised rows are rounded to integers of up to 32512 times a scale
for each 32 elements: off by up to half of the largest of them / 32512. On the matrix units both factors are rounded
to float16 first: 2 * 2^-11, and 2^-25 for what is subnormal there.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Iterator

import numpy as np
import pytest

from gpu.blocks import random_rows, values_of
from gpu.conftest import EMULATED
from gpu.device import (
    KERNEL_TYPES,
    TYPES,
    Device,
    DeviceError,
    Norm,
    Product,
    Rows,
    opened,
)

UNIT = 2.0**-24
HALF_UNIT = 2.0**-11
TINY_HALF = 2.0**-25
FLOATS = ("F32", "F16", "BF16")


def rounding(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What rounding x [..., n] to 16 bits, 32 elements at a time, changes in its products with weights [n_rows, n]."""
    peaks = np.abs(x.reshape(*x.shape[:-1], -1, 32)).max(-1).astype(np.float64)
    sizes = np.abs(weights.astype(np.float64)).reshape(len(weights), -1, 32).sum(-1)
    return 0.51 / 32512 * peaks @ sizes.T


def close(
    got: np.ndarray,
    weights: np.ndarray,
    x: np.ndarray,
    halves: bool = False,
    rounded: bool = False,
) -> None:
    """Hold got [n_tokens, n_rows] against x [n_tokens, n] . weights [n_rows, n]^T."""
    w64, x64 = weights.astype(np.float64), x.astype(np.float64)
    magnitude = np.abs(x64) @ np.abs(w64).T
    bound = (x.shape[-1] / 32 + 40) * UNIT * magnitude
    if rounded:
        bound = bound + rounding(weights, x)
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
    device: Device,
    rows: list[Rows],
    x: np.ndarray,
    bias: list[int | None],
    norm: object = None,
) -> list[np.ndarray]:
    outs = [device.poisoned((len(x), r.n_rows)) for r in rows]
    products = (Product * len(rows))(
        *(Product(r, b, o, 0, 0) for r, b, o in zip(rows, bias, outs, strict=True))
    )
    device.multiply(products, len(rows), device.put(x), len(x), norm)
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
    close(got, values_of(kind, data, n_cols), x, rounded=kind not in FLOATS)


@pytest.mark.parametrize("n_cols", [32, 64, 288, 576, 1536, 8192, 11008])
@pytest.mark.parametrize("kind", ["Q4_0", "F16", "Q8_0"])
def test_row_lengths(device: Device, kind: str, n_cols: int) -> None:
    data = random_rows(kind, 19, n_cols, seed=6)
    for n_tokens in (1, 8):
        x = some_x(n_tokens, n_cols, seed=n_cols)
        (got,) = multiply(device, [device.rows(kind, data, n_cols)], x, [None])
        close(got, values_of(kind, data, n_cols), x, rounded=kind not in FLOATS)


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
    device.multiply_transposed(ct.byref(rows), device.put(h), n_tokens, 0, out)
    close(
        device.get(out, (n_tokens, n_cols)),
        values_of(kind, data, n_cols).T,
        h,
        halves=n_tokens > 16,
    )


@pytest.mark.parametrize("n_active", [0, 1, 16, 61])
def test_sums_of_few_rows(device: Device, n_active: int) -> None:
    """Rows whose coefficient is 0 are not read: they may hold anything."""
    n_rows, n_cols = 2000, 512
    data = random_rows("F16", n_rows, n_cols, seed=10)
    active = np.zeros(n_rows, bool)
    active[np.random.default_rng(n_active).choice(n_rows, n_active, replace=False)] = True
    weights = values_of("F16", data, n_cols)
    data[~active] = 0xFF  # NaN
    h = np.where(active, some_x(1, n_rows), 0).astype(np.float32)
    rows, out = device.rows("F16", data, n_cols), device.poisoned((1, n_cols))
    device.multiply_transposed(ct.byref(rows), device.put(h), 1, 0, out)
    close(device.get(out, (1, n_cols)), weights[active].T, h[:, active])


def test_sums_of_rows_have_the_same_bits_every_time(device: Device) -> None:
    data = random_rows("Q4_0", 700, 1024, seed=11)
    rows, h = device.rows("Q4_0", data, 1024), device.put(some_x(1, 700))
    outs = []
    for _ in range(2):
        out = device.poisoned(1024)
        device.multiply_transposed(ct.byref(rows), h, 1, 0, out)
        outs.append(device.get(out, 1024))
    np.testing.assert_array_equal(outs[0], outs[1])


def test_what_the_kernels_do_not_take_is_refused(device: Device) -> None:
    assert device.api.row_stride(KERNEL_TYPES["F16"], 48) == 0
    assert device.api.row_stride(KERNEL_TYPES["Q4_K"], 288) == 0
    assert device.api.row_stride(99, 256) == 0
    with pytest.raises(DeviceError, match="multiples of 32"):
        device.fetch_rows(ct.byref(Rows(1, 16, 1, 48, 1)), 1, 1, 1)


def normed(x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    x64 = x.astype(np.float64)
    return x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + eps) * gain


@pytest.mark.parametrize("n_tokens", [1, 3, 8, 11, 20])
@pytest.mark.parametrize(("kind", "n_cols"), [("F32", 1280), ("Q4_0", 1280), ("Q8_0", 8704)])
def test_products_of_normalised_vectors(
    device: Device, kind: str, n_cols: int, n_tokens: int
) -> None:
    data, x = random_rows(kind, 21, n_cols, seed=12), some_x(n_tokens, n_cols) * 3
    gain = some_x(1, n_cols, seed=13)[0]
    norm = Norm(device.put(gain), 1e-5, device.poisoned(x.shape))
    (got,) = multiply(device, [device.rows(kind, data, n_cols)], x, [None], ct.byref(norm))
    want = normed(x, gain, 1e-5)
    few = n_tokens <= 16
    close(
        got, values_of(kind, data, n_cols), want, halves=not few, rounded=few and kind not in FLOATS
    )


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
def test_vectors_longer_than_shared_memory(device: Device, kind: str) -> None:
    """Launches of two halves: one norm, one bias, and ReLU of the whole sum only."""
    n_rows, n_cols = 21, 49_152
    data, x = random_rows(kind, n_rows, n_cols, seed=21), some_x(3, n_cols) * 3
    gain, bias = some_x(1, n_cols, seed=22)[0], some_x(1, n_rows, seed=23)[0]
    rows, out = device.rows(kind, data, n_cols), device.poisoned((3, n_rows))
    norm = Norm(device.put(gain), 1e-5, device.poisoned(x.shape))
    product = Product(rows, device.put(bias), out, 0, 1)
    device.multiply(ct.byref(product), 1, device.put(x), 3, ct.byref(norm))
    weights, want_x = values_of(kind, data, n_cols).astype(np.float64), normed(x, gain, 1e-5)
    want, half = want_x @ weights.T + bias, n_cols // 2
    of_half = want_x[:, :half] @ weights[:, :half].T + bias
    assert ((of_half < -0.1) & (want > 0.1)).any()  # which ReLU between the halves would change
    bound = (n_cols / 32 + 40) * UNIT * (np.abs(want_x) @ np.abs(weights).T + np.abs(bias))
    if kind not in FLOATS:
        bound = bound + rounding(weights, want_x)
    assert (np.abs(device.get(out, want.shape) - np.maximum(want, 0)) <= bound).all()


@pytest.mark.parametrize("n_tokens", [1, 5, 20])
def test_products_that_are_added(device: Device, n_tokens: int) -> None:
    n_rows, n_cols = 64, 256
    rows = device.rows("Q8_0", random_rows("Q8_0", n_rows, n_cols, seed=14), n_cols)
    x, h = device.put(some_x(n_tokens, n_cols)), device.put(some_x(n_tokens, n_rows))

    def product(add: int, out: int) -> None:
        device.multiply(ct.byref(Product(rows, None, out, add, 0)), 1, x, n_tokens, None)

    def positive(add: int, out: int) -> None:
        device.multiply(ct.byref(Product(rows, None, out, add, 1)), 1, x, n_tokens, None)

    def transposed(add: int, out: int) -> None:
        device.multiply_transposed(ct.byref(rows), h, n_tokens, add, out)

    for run, n in ((product, n_rows), (transposed, n_cols)):
        before = some_x(n_tokens, n, seed=n)
        alone, added = device.poisoned(before.shape), device.put(before)
        run(0, alone)
        run(1, added)
        np.testing.assert_array_equal(
            device.get(added, before.shape), before + device.get(alone, before.shape)
        )
    all_of_it, above = device.poisoned((n_tokens, n_rows)), device.poisoned((n_tokens, n_rows))
    product(0, all_of_it)
    positive(0, above)
    np.testing.assert_array_equal(
        device.get(above, (n_tokens, n_rows)),
        np.maximum(device.get(all_of_it, (n_tokens, n_rows)), 0),
    )


def large_products(device: Device, n_rows: int) -> None:
    n_cols = 512
    data = random_rows("Q4_0", n_rows, n_cols, seed=20)
    weights, rows = values_of("Q4_0", data, n_cols), device.rows("Q4_0", data, n_cols)
    for n_tokens in (17, 130):
        x, bias = some_x(n_tokens, n_cols), some_x(1, n_rows)[0]
        x[3] *= np.float32(2.0**20)  # beyond float16
        (got,) = multiply(device, [rows], x, [device.put(bias)])
        close(got - bias, weights, x, halves=True)
        h, before = some_x(n_tokens, n_rows), some_x(n_tokens, n_cols)
        h[2] *= np.float32(2.0**20)
        out = device.put(before)
        device.multiply_transposed(ct.byref(rows), device.put(h), n_tokens, 1, out)
        close(device.get(out, before.shape) - before, weights.T, h, halves=True)


def by_gemm(device_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Device]]:
    """A device without and with cuBLASLt; only without where a GPU's machine does not have it."""
    for gemm in ("own", "cublaslt"):
        monkeypatch.setenv("PI_GPU_GEMM", gemm)
        try:
            with opened(device_name) as device:
                yield gemm, device
        except DeviceError as failure:
            if gemm == "own" or device_name == EMULATED or "libcublasLt" not in str(failure):
                raise


def test_large_products_by_cublaslt(device_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bounds as the own kernel, which computes what the library has no loaded kernel for.

    A product by the library is two launches, three where it is added. The emulated one has no kernel for 32 outputs.
    """
    n_launches: dict[str, list[int]] = {}
    for gemm, device in by_gemm(device_name, monkeypatch):
        counts = []
        for n_rows in (160, 32):
            before = device.info_now().n_launches
            large_products(device, n_rows)
            counts.append(device.info_now().n_launches - before)
        n_launches[gemm] = counts
    if device_name == EMULATED:
        assert n_launches["cublaslt"][0] - n_launches["own"][0] == 2 * (1 + 2)
        assert n_launches["cublaslt"][1] - n_launches["own"][1] == 2 * 2


def test_an_unknown_way_to_multiply(device_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI_GPU_GEMM", "none")
    with pytest.raises(DeviceError, match="neither own nor cublaslt"), opened(device_name):
        pass


def test_what_cublaslt_takes_is_told(device_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of the context, so that the planner's probe knows it."""
    context = {g: d.info_now().context_bytes for g, d in by_gemm(device_name, monkeypatch)}
    if "cublaslt" in context:
        assert context["cublaslt"] >= context["own"] + 8 * 2**20
