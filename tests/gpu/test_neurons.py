"""A token's neurons, all of them or those that a mask or a predictor names, against float64 products."""

from __future__ import annotations

import ctypes as ct

import numpy as np
import pytest

from gpu.blocks import random_rows, values_of
from gpu.device import TYPES, Device, Mask, Neurons, Norm, Predictor
from gpu.test_products import FLOATS, UNIT, normed, rounding, some_x

SILU, RELU = 0, 1


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("activation", [SILU, RELU])
@pytest.mark.parametrize(
    ("gate_kind", "up_kind", "n_cols"),
    [(kind, kind, 512) for kind in TYPES] + [("F16", "Q4_0", 512), ("Q8_0", "Q8_0", 8704)],
)
def test_neurons_of_a_token(
    device: Device, gate_kind: str, up_kind: str, n_cols: int, activation: int, masked: bool
) -> None:
    n_rows, threshold = 83, 0.1
    x, gain = some_x(1, n_cols), some_x(1, n_cols, seed=2)[0]
    kinds, seeds = (gate_kind, up_kind), (15, 16)
    data = [random_rows(k, n_rows, n_cols, seed=s) for k, s in zip(kinds, seeds, strict=True)]
    rows = [device.rows(k, d, n_cols) for k, d in zip(kinds, data, strict=True)]
    norm = Norm(device.put(gain), 1e-5, None)
    let_through = np.random.default_rng(17).random(n_rows) < (0.3 if masked else 2)
    bits = np.packbits(np.append(let_through, np.ones(96 - n_rows, bool)), bitorder="little")
    counts, out = device.put(np.array([5, 7], np.uint64)), device.poisoned(n_rows)
    mask = device.put(bits.view(np.uint32)) if masked else None
    work = Neurons(
        *(*rows, device.put(x), ct.pointer(norm), mask, None),
        *(activation, threshold, counts, counts + 8, out),
    )
    device.neurons(ct.byref(work))

    want_x = normed(x, gain, 1e-5)
    gate, up = (
        (values_of(k, d, n_cols).astype(np.float64) @ want_x[0])
        for k, d in zip(kinds, data, strict=True)
    )
    fires = let_through & ((gate > threshold) if activation == RELU else True)
    act = gate if activation == RELU else gate / (1 + np.exp(-np.maximum(gate, -500)))
    want = np.where(fires, act * up, 0)
    got = device.get(out, n_rows)
    # Both factors are as exact as other products of single vectors.
    sums = [
        (np.abs(values_of(k, d, n_cols).astype(np.float64)) @ np.abs(want_x[0]))
        for k, d in zip(kinds, data, strict=True)
    ]
    error = [
        (n_cols / 32 + 40) * UNIT * s
        + (0 if k in FLOATS else rounding(values_of(k, d, n_cols), want_x)[0])
        for s, k, d in zip(sums, kinds, data, strict=True)
    ]
    # SiLU's slope is at most 1.1.
    bound = 1.1 * error[0] * (np.abs(up) + error[1]) + error[1] * np.abs(act) + 1e-6 * np.abs(want)
    sure = np.abs(gate - threshold) > error[0] if activation == RELU else np.ones(n_rows, bool)
    assert sure.mean() > 0.9
    assert (np.abs(got - want) <= bound)[sure].all()
    assert (got[~let_through] == 0).all()
    n_masked, n_active = device.get(counts, 2, np.uint64) - np.array([5, 7], np.uint64)
    assert n_masked == let_through.sum()
    if activation == RELU:
        assert abs(int(n_active) - int(fires.sum())) <= (~sure).sum()


@pytest.mark.parametrize("n_rows", [83, 700])
@pytest.mark.parametrize("up_kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize(
    ("kind", "rank"), [("F16", 96), ("F16", 704), ("Q8_0", 224), ("Q5_0", 704), ("Q4_0", 96)]
)
def test_neurons_that_a_predictor_names(
    device: Device, kind: str, rank: int, up_kind: str, n_rows: int
) -> None:
    """The same neurons, bit for bit, as with the mask of its logits in float64, which is also what it says by itself."""
    n_cols = 128
    seeds = (("Q4_0", 21), (up_kind, 22))
    gate, up = (device.rows(k, random_rows(k, n_rows, n_cols, seed=s), n_cols) for k, s in seeds)
    x, hidden = device.put(some_x(1, n_cols)), np.maximum(some_x(1, rank, seed=23), 0)
    data = random_rows(kind, n_rows, rank, seed=24)
    fc2 = values_of(kind, data, rank)
    logits = (hidden.astype(np.float64) @ fc2.astype(np.float64).T)[0]
    magnitude = (hidden.astype(np.float64) @ np.abs(fc2).astype(np.float64).T)[0]
    error = (rank / 32 + 40) * UNIT * magnitude
    if kind not in FLOATS:
        error = error + rounding(fc2, hidden)[0]
    # A threshold in the widest gap between logits of the upper half: none of them is in doubt.
    order = np.sort(logits)
    at = n_rows // 2 + np.argmax(np.diff(order[n_rows // 2 : -3]))
    threshold = np.float32((order[at] + order[at + 1]) / 2)
    assert (np.abs(logits - threshold) > error).all()
    named = logits >= threshold
    bits = np.packbits(np.append(named, np.zeros(-n_rows % 32, bool)), bitorder="little")
    predictor = Predictor(
        device.rows(kind, data, rank),
        *(device.put(hidden), float(threshold)),
        *(device.poisoned(n_rows), device.poisoned(bits.size // 4)),
    )
    results = []
    for choice in ((device.put(bits.view(np.uint32)), None), (None, ct.pointer(predictor))):
        counts, out = device.put(np.zeros(2, np.uint64)), device.poisoned(n_rows)
        work = Neurons(gate, up, x, None, *choice, RELU, 0.0, counts, counts + 8, out)
        device.neurons(ct.byref(work))
        results.append((device.get(out, n_rows), device.get(counts, 2, np.uint64)))
    words = device.poisoned(bits.size // 4)
    device.mask(ct.byref(Mask(predictor=ct.pointer(predictor), words=words)))
    np.testing.assert_array_equal(
        device.get(words, bits.size // 4, np.uint32), bits.view(np.uint32)
    )
    (by_mask, counts_by_mask), (got, got_counts) = results
    np.testing.assert_array_equal(got, by_mask)
    np.testing.assert_array_equal(got_counts, counts_by_mask)
    assert got_counts[0] == named.sum()
    assert (got[named] != 0).any()
    assert (got[~named] == 0).all()
