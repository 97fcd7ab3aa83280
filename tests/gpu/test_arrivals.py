"""Rows that come beside what is queued, rows in host memory, and masks of many tokens: the device's operations (about 5 s)."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from gpu.blocks import random_rows
from gpu.device import KERNEL_TYPES, TYPES, Device, DeviceError, Product, Ptr, Rows

N_ROWS, N_COLS = 9, 512


@contextmanager
def pinned(device: Device, n_bytes: int) -> Iterator[tuple[np.ndarray, int]]:
    """Host memory as bytes, and its address for operations."""
    host, address = Ptr(), Ptr()
    device.allocate_host(n_bytes, ct.byref(host), ct.byref(address))
    assert host.value is not None
    assert address.value is not None
    yield np.ctypeslib.as_array((ct.c_uint8 * n_bytes).from_address(host.value)), address.value
    device.synchronize()
    device.release_host(host)


def uploaded(device: Device, kind: str, data: np.ndarray) -> np.ndarray:
    """[N_ROWS, row_stride] bytes; a row's last ones may be padding, which nobody writes."""
    rows = device.rows(kind, data, N_COLS)
    return device.get(rows.data, (N_ROWS, rows.row_stride), np.uint8)


@pytest.mark.parametrize("kind", TYPES)
def test_pieces_one_after_the_other(device: Device, kind: str) -> None:
    """Through one place on the device and two on the host, which are reused as early as the interface allows."""
    pieces = [random_rows(kind, N_ROWS, N_COLS, seed) for seed in range(5)]
    row_bytes, stride = pieces[0].shape[1], device.api.row_stride(KERNEL_TYPES[kind], N_COLS)
    n_bytes, n_apart = N_ROWS * row_bytes, N_ROWS * stride
    raw, apart = device.poisoned(n_bytes, np.uint8), device.poisoned(n_apart, np.uint8)
    kept = device.poisoned(len(pieces) * n_apart, np.uint8)
    rows = Rows(apart, stride, KERNEL_TYPES[kind], N_COLS, N_ROWS)
    with pinned(device, 2 * n_bytes) as (host, _):
        for i, piece in enumerate(pieces):
            slot = host[i % 2 * n_bytes :][:n_bytes]
            device.await_brought(i % 2)
            slot[:] = piece.ravel()
            device.bring(i % 2, slot.ctypes.data, n_bytes, raw)
            device.take_apart(raw, row_bytes, ct.byref(rows))
            device.copy(apart, n_apart, kept + i * n_apart)
        found = device.get(kept, (len(pieces), N_ROWS, stride), np.uint8)
    for piece, got in zip(pieces, found, strict=True):
        want = uploaded(device, kind, piece)
        np.testing.assert_array_equal(got[:, :row_bytes], want[:, :row_bytes])


def test_what_is_no_slot_and_no_graph(device: Device) -> None:
    to = device.empty(256)
    with pinned(device, 256) as (host, _):
        with pytest.raises(DeviceError, match="no such slot"):
            device.bring(2, host.ctypes.data, 256, to)
        device.begin_capture()
        with pytest.raises(DeviceError, match="while a graph is being recorded"):
            device.bring(0, host.ctypes.data, 256, to)
        device.end_capture(None)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_rows_in_host_memory(device: Device, kind: str, transposed: bool) -> None:
    """The same bits as of rows in device memory, on the matrix units too."""
    n_tokens = 20
    here = device.rows(kind, random_rows(kind, N_ROWS, N_COLS, seed=3), N_COLS)
    shape = (N_ROWS, N_COLS) if transposed else (N_COLS, N_ROWS)
    x = device.put(np.random.default_rng(1).standard_normal((n_tokens, shape[0]), np.float32))
    found = []
    with pinned(device, N_ROWS * here.row_stride) as (host, address):
        host[:] = device.get(here.data, host.size, np.uint8)
        there = Rows(address, here.row_stride, here.kernel_type, N_COLS, N_ROWS, 1)
        for rows in (here, there):
            out = device.poisoned((n_tokens, shape[1]))
            if transposed:
                device.multiply_transposed(ct.byref(rows), x, n_tokens, 0, out)
            else:
                device.multiply(ct.byref(Product(rows, None, out)), 1, x, n_tokens, None)
            found.append(device.get(out, (n_tokens, shape[1])))
    assert np.isfinite(found[0]).all()
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("n", [32, 300, 1056])
def test_hidden_neurons(device: Device, n: int) -> None:
    """Of a range within a token's mask; the last word may have bits of neurons beyond it."""
    rng, n_tokens, words = np.random.default_rng(n), 5, (n + 31) // 32 + 2
    mask = rng.integers(0, 2**32, (n_tokens, words), np.uint32)
    gate = rng.standard_normal((n_tokens, n), np.float32)
    open_ = np.unpackbits(mask.view(np.uint8), axis=1, bitorder="little")[:, 32 : 32 + n] != 0
    on_device, count = device.put(gate), device.put(np.array([7], np.uint64))
    device.hide(device.put(mask) + 4, words, n_tokens, n, on_device, count)
    want = np.where(open_, gate, -np.inf)
    np.testing.assert_array_equal(device.get(on_device, (n_tokens, n)), want)
    assert device.get(count, 1, np.uint64)[0] == 7 + open_.sum()
