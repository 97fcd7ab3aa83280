"""Keys and values in their pages and attention over them, against a softmax in float64.

With a float32 cache results agree to float32 rounding. A float16 cache is compared with the rounded keys and
values; kernels on the matrix units also round the query and the weights, 2^-11 each of a score's magnitude.
"""

from __future__ import annotations

import ctypes as ct
from dataclasses import dataclass

import numpy as np
import pytest

from gpu.device import Attention, Device, Kv, Rope, Step

PAGE = 32


@dataclass
class Case:
    """New tokens of several sequences: lengths before the step and new tokens of each."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    n_heads: int = 6
    n_kv_heads: int = 2
    head_dim: int = 64
    window: int = 0
    half: bool = True
    tree: bool = False
    tiles: bool = True

    @property
    def n_tokens(self) -> int:
        return sum(self.new)


class Pages:
    """A cache on the device with its block table; pages are dealt out in a shuffled order."""

    def __init__(self, device: Device, case: Case) -> None:
        self.device, self.case = device, case
        rng = np.random.default_rng(0)
        lengths = [o + n for o, n in zip(case.old, case.new, strict=True)]
        stride = max(-(-n // PAGE) for n in lengths) + 3
        n_pages = sum(-(-n // PAGE) for n in lengths)
        order = rng.permutation(n_pages).astype(np.uint32)
        table = np.full((len(lengths), stride), 2**31, np.uint32)
        for row, n in zip(table, lengths, strict=True):
            used = -(-n // PAGE)
            row[:used], order = order[:used], order[used:]
        self.stride, self.table = stride, device.put(table)
        element = 2 if case.half else 4
        page_bytes = case.n_kv_heads * 2 * case.head_dim * PAGE * element
        base = device.empty(page_bytes * n_pages)
        device.zero(base, page_bytes * n_pages)
        self.kv = Kv(base, page_bytes, int(case.half), case.n_kv_heads, case.head_dim)

    def step(self, old: list[int], new: list[int], tree: np.ndarray | None = None) -> Step:
        device = self.device
        sequence = np.repeat(np.arange(len(new)), new).astype(np.uint32)
        old_length = np.repeat(old, new).astype(np.uint32)
        slot = np.concatenate([o + np.arange(n) for o, n in zip(old, new, strict=True)])
        window = self.case.window
        oldest = np.maximum(slot + 1 - window, 0) if window else np.zeros_like(slot)
        words = 0 if tree is None else tree.shape[1]
        return Step(
            *(len(slot), self.stride, self.table, device.put(sequence)),
            *(device.put(slot.astype(np.uint32)), device.put(oldest.astype(np.uint32))),
            *(device.put(old_length), None if tree is None else device.put(tree), words),
            int(slot.max()) // PAGE + 1,
        )

    def store(self, step: Step, k: np.ndarray, v: np.ndarray) -> None:
        """As they are: no query head, and none of K turned."""
        keys, values = self.device.put(k), self.device.put(v)
        self.device.place_heads(
            ct.byref(self.kv), ct.byref(step), ct.byref(Rope()), None, keys, values
        )


def rounded(x: np.ndarray, case: Case) -> np.ndarray:
    return x.astype(np.float16 if case.half else np.float32).astype(np.float64)


def expected(
    case: Case, q: np.ndarray, k: list[np.ndarray], v: list[np.ndarray], tree: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs [n_tokens, n_heads, head_dim], log-sum-exp, and the largest |q| . |k| of each row."""
    out = np.zeros(q.shape)
    lse, magnitude = np.zeros(q.shape[:2]), np.zeros(q.shape[:2])
    group, token = case.n_heads // case.n_kv_heads, 0
    for s, (old, new) in enumerate(zip(case.old, case.new, strict=True)):
        for i in range(new):
            last = old + i
            positions = np.arange(last + 1)
            if tree is not None:
                bits = np.unpackbits(tree[token].view(np.uint8), bitorder="little")[:new]
                positions = np.concatenate([np.arange(old), old + np.nonzero(bits)[0]])
            if case.window:
                positions = positions[positions > last - case.window]
            for h in range(case.n_heads):
                keys, values = k[s][positions, h // group], v[s][positions, h // group]
                scores = keys @ q[token, h].astype(np.float64) / np.sqrt(case.head_dim)
                peak = scores.max()
                weights = np.exp(scores - peak)
                out[token, h] = weights @ values / weights.sum()
                lse[token, h] = peak + np.log(weights.sum())
                magnitude[token, h] = (
                    np.abs(keys) @ np.abs(q[token, h]) / np.sqrt(case.head_dim)
                ).max()
            token += 1
    return out, lse, magnitude


def tiles_of(case: Case) -> np.ndarray:
    tiles, begin = [], 0
    for n in case.new:
        for first in range(begin, begin + n, 64):
            tiles.append((first, min(first + 64, begin + n)))
        begin += n
    return np.array(tiles, np.uint32)


def random_tree(case: Case) -> np.ndarray:
    """Every token sees itself and a random half of the tokens before it in its sequence."""
    rng = np.random.default_rng(5)
    words = (max(case.new) + 63) // 64
    rows = []
    for n in case.new:
        for i in range(n):
            bits = np.zeros(words * 64, np.uint8)
            bits[:i] = rng.integers(0, 2, i)
            bits[i] = 1
            rows.append(np.packbits(bits, bitorder="little").view(np.uint64))
    return np.array(rows)


CASES = {
    "decode": Case((5,), (1,)),
    "decode, float32": Case((70,), (1,), half=False),
    "decode, long": Case((1900, 33), (1, 1)),
    "decode, no groups": Case((255,), (1,), n_heads=4, n_kv_heads=4, head_dim=128),
    "decode, groups of eight": Case((2100,), (1,), n_heads=8, n_kv_heads=1),
    "decode, groups of twelve": Case((130,), (2,), n_heads=24, n_kv_heads=2, head_dim=128),
    "decode, groups of five, float32": Case((600,), (1,), n_heads=5, n_kv_heads=1, half=False),
    "decode, pairs": Case((290,), (1,), n_heads=4, n_kv_heads=2, head_dim=256),
    "odd heads": Case((40,), (3,), head_dim=26, n_heads=2),
    "large heads": Case((40,), (9,), head_dim=256, n_heads=2),
    "window": Case((300,), (2,), window=100),
    "prompt": Case((0,), (150,)),
    "prompt, float32": Case((0,), (40,), half=False),
    "prompt, token by token": Case((0,), (40,), tiles=False),
    "prompt after a context": Case((45,), (70,), head_dim=128),
    "prompts of two sequences": Case((0, 31), (9, 66), head_dim=80, n_heads=4),
    "prompt, small heads": Case((3,), (12,), head_dim=32),
    "prompt, window": Case((40,), (90,), window=50, head_dim=96, n_heads=2, n_kv_heads=1),
    "tree": Case((35, 0), (11, 4), tree=True),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(device: Device, name: str) -> None:
    case = CASES[name]
    rng = np.random.default_rng(len(name))
    pages = Pages(device, case)
    lengths = [o + n for o, n in zip(case.old, case.new, strict=True)]
    shape = (case.n_kv_heads, case.head_dim)
    k = [rng.standard_normal((n, *shape)).astype(np.float32) for n in lengths]
    v = [rng.standard_normal((n, *shape)).astype(np.float32) for n in lengths]
    q = rng.standard_normal((case.n_tokens, case.n_heads, case.head_dim)).astype(np.float32)
    tree = random_tree(case) if case.tree else None

    def part(of: list[np.ndarray], new: bool) -> np.ndarray:
        return np.concatenate([x[o:] if new else x[:o] for x, o in zip(of, case.old, strict=True)])

    if sum(case.old):
        before = pages.step([0] * len(case.old), list(case.old))
        pages.store(before, part(k, False), part(v, False))
    step = pages.step(list(case.old), list(case.new), tree)
    pages.store(step, part(k, True), part(v, True))
    out, lse = device.poisoned(q.shape), device.poisoned(q.shape[:2])
    tiles = tiles_of(case)
    work = Attention(pages.kv, step, case.n_heads, device.put(q), out, lse)
    if case.tiles and not case.tree:
        work.tiles, work.n_tiles = device.put(tiles), len(tiles)
    device.attend(ct.byref(work))

    keys, values = [rounded(x, case) for x in k], [rounded(x, case) for x in v]
    want, want_lse, magnitude = expected(case, q, keys, values, tree)
    # A score is off by at most `score`, a weight by e^score - 1 relatively, the mean by twice that times the
    # largest value, and by the rounding of the weights themselves.
    halves = case.half and case.tiles and not case.tree and case.n_tokens >= 8
    score = magnitude * ((2.0**-11 if halves else 0) + 300 * 2.0**-24)
    bound = np.abs(v[0]).max() * (2 * np.expm1(score) + (2.0**-10 if halves else 2e-6))
    got = device.get(out, q.shape)
    assert np.isfinite(got).all()
    assert (np.abs(got - want) <= bound[..., None]).all(), np.abs(got - want).max()
    assert (np.abs(device.get(lse, q.shape[:2]) - want_lse) <= score + 1e-5).all()


@pytest.mark.parametrize(("head_dim", "n_rot"), [(64, 64), (80, 32), (26, 24)])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("n_tokens", [5, 75])  # many go through shared memory
def test_heads_are_turned_and_placed(
    device: Device, head_dim: int, n_rot: int, half: bool, n_tokens: int
) -> None:
    case = Case((30,), (n_tokens,), n_heads=3, n_kv_heads=2, head_dim=head_dim, half=half)
    pages = Pages(device, case)
    rng = np.random.default_rng(head_dim)
    step = pages.step([30], [n_tokens])
    q, k, v = (rng.standard_normal((n_tokens, n, head_dim)).astype(np.float32) for n in (3, 2, 2))
    angle = rng.standard_normal((n_tokens, n_rot // 2)) * 10
    cosine, sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    on_device = [device.put(x) for x in (q, k, v)]
    rope = Rope(3, n_rot, device.put(cosine), device.put(sine))
    device.place_heads(ct.byref(pages.kv), ct.byref(step), ct.byref(rope), *on_device)

    def turned(x: np.ndarray) -> np.ndarray:
        out = x.astype(np.float64)
        a, b = out[..., 0:n_rot:2].copy(), out[..., 1:n_rot:2].copy()
        c, s = cosine[:, None].astype(np.float64), sine[:, None].astype(np.float64)
        out[..., 0:n_rot:2], out[..., 1:n_rot:2] = a * c - b * s, a * s + b * c
        return out

    # Two products and a sum in float32; float16 rounds what is stored.
    close = {"rtol": 0, "atol": 4e-7 * np.abs(q).max()}
    np.testing.assert_allclose(device.get(on_device[0], q.shape), turned(q), **close)
    dtype = np.float16 if half else np.float32
    n_pages = -(-(30 + n_tokens) // PAGE)
    stored = device.get(pages.kv.base, (n_pages, 2, 2, head_dim * PAGE), dtype)
    table = device.get(pages.table, n_pages, np.uint32)
    for token, slot in enumerate(range(30, 30 + n_tokens)):
        for head in range(2):
            keys, values = stored[table[slot // PAGE], head]
            got = keys.reshape(head_dim, PAGE)[:, slot % PAGE].astype(np.float64)
            np.testing.assert_allclose(
                got, turned(k)[token, head], rtol=2**-11 if half else 0, atol=close["atol"]
            )
            np.testing.assert_array_equal(
                values.reshape(PAGE, head_dim)[slot % PAGE], v[token, head].astype(dtype)
            )
