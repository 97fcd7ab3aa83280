"""Row-wise operations, lists of neurons, memory and failures of the device library, against numpy in float64."""

from __future__ import annotations

import ctypes as ct

import numpy as np
import pytest

from gpu.device import Device, DeviceError, opened

DOES_NOT_FIT = 3
SILU, RELU = 0, 1


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("n_rows", "n"), [(1, 4096), (3, 576), (70, 33)])
def test_rms_norm(device: Device, n_rows: int, n: int) -> None:
    x, gain = normal(n_rows, n) * 3, normal(n, seed=1)
    out = device.poisoned((n_rows, n))
    device.rms_norm(device.put(x), device.put(gain), n_rows, n, 1e-5, out)
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-5) * gain
    # Squares and their sum: relative error of the root about n / 512 / 2 + 6 units.
    np.testing.assert_allclose(device.get(out, (n_rows, n)), want, rtol=2e-6, atol=0)


def test_gather(device: Device) -> None:
    x, index = normal(9, 100), np.array([8, 0, 3, 3], np.uint32)
    rows = device.poisoned((4, 100))
    device.gather(device.put(x), device.put(index), 4, 100, rows)
    np.testing.assert_array_equal(device.get(rows, (4, 100)), x[index])


@pytest.mark.parametrize("activation", [SILU, RELU])
def test_gated(device: Device, activation: int) -> None:
    n = 70_000
    gate, up = normal(n) * 20, normal(n, seed=1)
    data, counter = device.put(gate), device.put(np.array([5], np.uint64))
    device.gated(activation, 0.25, device.put(up), n, data, counter)
    g = gate.astype(np.float64)
    act = g / (1 + np.exp(-g)) if activation == SILU else np.where(g > 0.25, g, 0)
    np.testing.assert_allclose(device.get(data, n), act * up, rtol=3e-6, atol=1e-30)
    fired = int((gate > 0.25).sum()) if activation == RELU else 0
    assert device.get(counter, 1, np.uint64)[0] == 5 + fired


@pytest.mark.parametrize("n_vocab", [33, 49_152])
def test_log_probabilities(device: Device, n_vocab: int) -> None:
    logits = normal(4, n_vocab) * 8
    logits[1, [7, 30]] = 100  # the smaller index of equal ones
    logits[3, -1] = 90
    targets = np.array([3, 30, -1, n_vocab - 1], np.int32)
    data, out = device.put(logits), device.poisoned(4)
    device.log_probabilities(data, 4, n_vocab, device.put(targets), out)
    x = logits.astype(np.float64)
    log_sum = np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1)
    want = x[np.arange(4), targets] - log_sum
    got = device.get(out, 4)
    assert np.isnan(got[2])
    np.testing.assert_allclose(got[[0, 1, 3]], want[[0, 1, 3]], rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("n", [1, 31, 1024, 11_008])
def test_the_record_of_neurons(device: Device, n: int) -> None:
    activations = normal(n, seed=n)
    activations[::3] = 0
    words = device.put(np.zeros((n + 63) // 64, np.uint64))
    device.record(device.put(activations), n, words)
    got = device.get(words, (n + 63) // 64, np.uint64).view(np.uint8)
    np.testing.assert_array_equal(np.unpackbits(got, bitorder="little")[:n], activations != 0)


def test_copies_of_any_size_arrive_whole(device: Device) -> None:
    for n in (1, 4097, 40 << 20):  # the last one takes the staging buffers more than once
        data = np.random.default_rng(n).integers(0, 256, n, np.uint8)
        there = device.put(data)
        again = device.empty(n)
        device.copy(there, n, again)
        np.testing.assert_array_equal(device.get(again, n, np.uint8), data)
    device.zero(again, n)
    assert not device.get(again, n, np.uint8).any()


def test_host_memory_may_change_after_an_upload(device: Device) -> None:
    sent, data = np.arange(5000, dtype=np.float32), device.empty(20_000)
    copy = sent.copy()
    for _ in range(5):
        device.upload(copy.ctypes.data, copy.nbytes, data)
        copy[:] = -1
        np.testing.assert_array_equal(device.get(data, 5000), sent)
        copy[:] = sent


def test_a_budget_is_a_ceiling(device_name: str) -> None:
    with opened(device_name) as device:
        context = device.info_now().context_bytes
        assert 64 << 20 <= context <= 2 << 30
    room = 64 << 20
    with opened(device_name, context + room) as device:
        kept = [device.empty(8 << 20) for _ in range(4)]
        with pytest.raises(DeviceError) as failure:
            device.empty(room)
        assert failure.value.status == DOES_NOT_FIT
        assert device.info_now().mapped_bytes <= room
        for data in kept:
            device.release(data)
        device.arrays.clear()
        assert device.info_now().mapped_bytes == 0, "memory was kept"
        assert device.empty(room - (4 << 20))


def test_freed_memory_is_used_again(device_name: str) -> None:
    with opened(device_name) as device:
        first = [device.empty(3 << 20) for _ in range(6)]
        mapped = device.info_now().mapped_bytes
        for data in first[1:4]:
            device.release(data)
            device.arrays.remove(data)
        device.empty(9 << 20)
        assert device.info_now().mapped_bytes <= mapped


def test_a_budget_below_the_context_is_refused(device_name: str) -> None:
    failing = pytest.raises(DeviceError, match="context alone takes")
    with failing as failure, opened(device_name, 1 << 20):
        pass
    assert failure.value.status == DOES_NOT_FIT


@pytest.mark.parametrize("from_host", [0, 1])
def test_rates_of_reading(device: Device, from_host: int) -> None:
    rate, before = ct.c_uint64(), device.info_now().mapped_bytes
    device.measure_read(from_host, 1 << 20, 0.0, ct.byref(rate))
    assert 1e6 < rate.value < 1e14
    assert device.info_now().mapped_bytes == before
    with pytest.raises(DeviceError, match="at least 1 MiB"):
        device.measure_read(from_host, 1000, 0.0, ct.byref(rate))
