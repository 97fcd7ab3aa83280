"""The largest logits of a row on the device, against a stable sort in numpy."""

from __future__ import annotations

import ctypes as ct

import numpy as np
import pytest

from gpu.device import Device, DeviceError, Ptr

MOST = 256
Case = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, logits, log-sums


def by_numpy(logits: np.ndarray, n_top: int) -> Case:
    """NaN before all, then descending; a stable sort leaves equal ones in the order of tokens."""
    falling = np.where(np.isnan(logits), -np.inf, -logits.astype(np.float64))
    falling[np.isnan(logits)] = -np.inf
    nan_first = np.where(np.isnan(logits), 0, 1)
    order = np.stack([np.lexsort((f, n)) for f, n in zip(falling, nan_first, strict=True)])
    tokens = order[:, :n_top].astype(np.int32)
    x = logits.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        terms = np.where(np.isneginf(x), 0, np.exp(x - x.max(-1, keepdims=True)))
        sums = np.log(terms.sum(-1))
    return tokens, np.take_along_axis(logits, tokens, 1), sums


def on_device(device: Device, logits: np.ndarray, n_top: int) -> Case:
    n_rows, n_vocab = logits.shape
    width = 2 * n_top + 1
    out = device.poisoned((n_rows, width))
    device.top(device.put(logits), n_rows, n_vocab, n_top, out)
    words = device.get(out, (n_rows, width), np.int32)
    found = min(n_top, n_vocab)
    assert (words[:, found:n_top] == -1).all()
    floats = words[:, n_top:].view(np.float32)
    assert np.isneginf(floats[:, found:n_top]).all()
    return words[:, :found], floats[:, :found], floats[:, n_top]


def check(device: Device, logits: np.ndarray, n_top: int) -> None:
    tokens, values, sums = on_device(device, logits, n_top)
    want_tokens, want_values, want_sums = by_numpy(logits, n_top)
    np.testing.assert_array_equal(tokens, want_tokens)
    np.testing.assert_array_equal(values.view(np.int32), want_values.view(np.int32))
    # Terms of at most 1 with errors of 2 units each, and sums of a thread, a block and all blocks.
    np.testing.assert_allclose(sums, want_sums, rtol=2e-6, atol=2e-6)


def normal(*shape: int) -> np.ndarray:
    return (np.random.default_rng(shape[-1]).standard_normal(shape) * 4).astype(np.float32)


@pytest.mark.parametrize("n_top", [1, 2, 40, 104, MOST])
@pytest.mark.parametrize("n_vocab", [1, 33, 2047, 2049, 32_000, 49_157])
def test_top_of_normal_logits(device: Device, n_vocab: int, n_top: int) -> None:
    check(device, normal(1, n_vocab), n_top)


@pytest.mark.parametrize("n_top", [1, 77, 128])
def test_rows_more_than_a_launch_takes(device: Device, n_top: int) -> None:
    check(device, normal(21, 5003), n_top)


def test_a_large_vocabulary(device: Device) -> None:
    check(device, normal(1, 152_064), 128)


@pytest.mark.parametrize("n_top", [1, 64, MOST])
@pytest.mark.parametrize(
    "kind", ["equal", "few values", "zeros", "ascending", "descending", "runs"]
)
def test_order_of_awkward_rows(device: Device, kind: str, n_top: int) -> None:
    n = 6151
    rng = np.random.default_rng(1)
    logits = {
        "equal": np.full(n, 0.5),
        "few values": rng.integers(-2, 2, n),
        "zeros": np.where(rng.random(n) < 0.5, 0.0, -0.0),
        "ascending": np.arange(n) / 7,
        "descending": -np.arange(n) / 7,
        # what is largest all in one part of the row, and in one thread's hands
        "runs": np.where(np.arange(n) // 512 % 4 == 1, 5.0, 0.0) + rng.random(n) / 2,
    }[kind]
    check(device, logits.astype(np.float32)[None], n_top)


@pytest.mark.parametrize("n_top", [1, 40, MOST])
def test_what_is_no_finite_number(device: Device, n_top: int) -> None:
    logits = normal(6, 4500)
    logits[0, 3] = logits[0, 4400] = np.nan
    logits[1, [9, 2000]] = np.inf
    logits[2, ::2] = -np.inf
    logits[3] = -np.inf
    logits[4] = -np.inf
    logits[4, 4321] = 1.5
    logits[5, 77], logits[5, 78], logits[5, 79] = np.inf, -np.float32(np.nan), -np.inf
    check(device, logits, n_top)


def test_largest_as_tiny_or_huge_numbers(device: Device) -> None:
    tiny = np.float32(1e-45)  # the smallest that is not 0
    logits = np.full((1, 3000), -3e38, np.float32)
    logits[0, [5, 2500, 17]] = [tiny, 0, -tiny]
    logits[0, 2999] = 3e38
    tokens, _, _ = on_device(device, logits, 5)
    assert tokens[0].tolist() == [2999, 5, 2500, 17, 0]


def test_two_runs_are_the_same_bits(device: Device) -> None:
    logits = normal(3, 32_000)
    one, two = on_device(device, logits, 128), on_device(device, logits, 128)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


def test_within_a_graph(device: Device) -> None:
    n_vocab, n_top = 5000, 64
    data, out = device.put(normal(2, n_vocab)), device.poisoned((2, 2 * n_top + 1))
    device.top(data, 2, n_vocab, n_top, out)  # its scratch
    graph = Ptr()
    device.reserve(0, 0, 0, 8 << 20)  # more than the graph takes
    device.begin_capture()
    device.top(data, 2, n_vocab, n_top, out)
    device.end_capture(ct.byref(graph))
    logits = normal(2, n_vocab)[:, ::-1].copy()
    device.upload(logits.ctypes.data, logits.nbytes, data)
    device.launch_graph(graph)
    tokens = device.get(out, (2, 2 * n_top + 1), np.int32)[:, :n_top]
    np.testing.assert_array_equal(tokens, by_numpy(logits, n_top)[0])
    device.release_graph(graph)


@pytest.mark.parametrize("n_top", [0, MOST + 1])
def test_more_than_it_finds_is_refused(device: Device, n_top: int) -> None:
    data = device.put(normal(1, 600))
    with pytest.raises(DeviceError, match="the device finds 1 to 256"):
        device.top(data, 1, 600, n_top, device.empty(4096))
