"""The native sampler's distribution against llama.cpp's chain written out in numpy.

Order: repeat penalty, top-k, top-p, min-p (all on probabilities at temperature 1), then temperature.
"""

from __future__ import annotations

import ctypes as ct
from dataclasses import dataclass

import numpy as np
import pytest

from parity.closeness import log_softmax
from powerinfer_toolkit.runtime import native_lib

N_DRAWS = 4000
LOGITS = np.array([2.0, 1.5, 1.4, 0.3, 0.0, -0.7, -0.8, -1.9, -3.0, -4.0, -0.75], dtype=np.float32)


@dataclass(frozen=True)
class Params:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    history: tuple[int, ...] = ()


CASES = {
    "plain": Params(),
    "cool": Params(temperature=0.6),
    "hot": Params(temperature=1.7),
    "top_k": Params(top_k=4),
    "top_k_beyond_vocabulary": Params(top_k=1000),
    "top_p": Params(top_p=0.8),
    "top_p_tiny_keeps_one": Params(top_p=1e-6),
    "min_p": Params(min_p=0.1),
    "cool_top_p": Params(temperature=0.5, top_p=0.7),
    "hot_min_p": Params(temperature=2.0, min_p=0.2),
    "everything": Params(0.8, 8, 0.9, 0.05, 1.3, 64, (0, 5, 2, 2)),
    "repeat": Params(repeat_penalty=1.5, history=(0, 7, 7, 4)),
    "repeat_window": Params(repeat_penalty=1.5, repeat_last_n=2, history=(0, 1, 7)),
    "repeat_whole": Params(repeat_penalty=1.2, repeat_last_n=-1, history=tuple(range(5)) * 40),
}


def expected_distribution(logits: np.ndarray, params: Params) -> np.ndarray:
    """[n_vocab] probabilities."""
    x = logits.astype(np.float64)
    last_n = len(params.history) if params.repeat_last_n < 0 else params.repeat_last_n
    for token in set(params.history[len(params.history) - min(last_n, len(params.history)) :]):
        x[token] = (
            x[token] / params.repeat_penalty if x[token] > 0 else x[token] * params.repeat_penalty
        )
    order = np.argsort(-x, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    p = np.exp(log_softmax(x[order]))
    if params.top_p < 1:
        order = order[: int(np.searchsorted(np.cumsum(p), params.top_p)) + 1]
        p = np.exp(log_softmax(x[order]))
    order = order[p >= params.min_p * p[0]]
    out = np.zeros(len(x))
    out[order] = np.exp(log_softmax(x[order] / params.temperature))
    return out


class Sampler:
    """A native sampler over plain logits."""

    def __init__(self, params: Params, seed: int) -> None:
        self._library = native_lib.load()
        self._handle = native_lib.Handle()
        native = native_lib.SamplerParams(
            top_k=params.top_k,
            seed=seed,
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            repeat_penalty=params.repeat_penalty,
            repeat_last_n=params.repeat_last_n,
        )
        self._library.pi_sampler_create(ct.byref(native), ct.byref(self._handle))
        for token in params.history:
            self._library.pi_sampler_accept(self._handle, token)

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self._library.pi_sampler_free(self._handle)

    def draw(self, logits: np.ndarray) -> tuple[int, float]:
        token, logprob = ct.c_int32(), ct.c_float()
        row = native_lib.pointer(np.ascontiguousarray(logits, np.float32), native_lib.FloatPtr)
        self._library.pi_sampler_sample_logits(
            self._handle, row, len(logits), ct.byref(token), ct.byref(logprob)
        )
        return token.value, logprob.value


def _draws(params: Params, seed: int, n: int = N_DRAWS) -> list[int]:
    with Sampler(params, seed) as sampler:
        return [sampler.draw(LOGITS)[0] for _ in range(n)]


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name):
    params = CASES[name]
    expected = expected_distribution(LOGITS, params)
    counts = np.bincount(_draws(params, seed=11), minlength=len(LOGITS))
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - N_DRAWS * expected[kept]) ** 2 / (N_DRAWS * expected[kept])).sum()
    # A chi-square of k degrees of freedom has mean k and variance 2k; six deviations above the mean is
    # beyond 1e-5 for every k here, and the seed is fixed.
    degrees = kept.sum() - 1
    assert chi_square <= degrees + 6 * np.sqrt(2 * max(degrees, 0))


def test_expected_distribution_by_hand():
    """Guards the formula: four tokens of probability 0.4, 0.3, 0.2, 0.1."""
    logits = np.log([0.2, 0.4, 0.1, 0.3]).astype(np.float32)
    top_p = expected_distribution(logits, Params(top_p=0.65))
    np.testing.assert_allclose(top_p, [0, 4 / 7, 0, 3 / 7], rtol=1e-6)
    min_p = expected_distribution(logits, Params(min_p=0.45))
    np.testing.assert_allclose(min_p, [2 / 9, 4 / 9, 0, 3 / 9], rtol=1e-6)
    cool = expected_distribution(logits, Params(temperature=0.5, top_k=2))
    np.testing.assert_allclose(cool, [0, 16 / 25, 0, 9 / 25], rtol=1e-6)


def test_seeds_decide_the_draws():
    assert _draws(Params(), seed=5, n=200) == _draws(Params(), seed=5, n=200)
    assert _draws(Params(), seed=5, n=200) != _draws(Params(), seed=6, n=200)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_greedy_is_argmax_with_the_first_of_equals(temperature):
    rng = np.random.default_rng(3)
    with Sampler(Params(temperature=temperature), seed=1) as sampler:
        for n_vocab in (1, 2, 33, 1000):
            logits = rng.integers(-9, 10, n_vocab).astype(np.float32)
            assert sampler.draw(logits)[0] == int(np.argmax(logits))


def test_greedy_applies_the_repeat_penalty():
    params = Params(temperature=0, repeat_penalty=1.5, history=(0,))
    with Sampler(params, seed=1) as sampler:
        assert sampler.draw(LOGITS)[0] == 1  # 2.0 / 1.5 < 1.5


def test_logprob_is_the_models_own():
    """The reported log-probability is that of the unfiltered softmax, whatever the sampler kept."""
    expected = log_softmax(LOGITS)
    with Sampler(Params(top_k=3, temperature=0.5), seed=2) as sampler:
        for _ in range(20):
            token, logprob = sampler.draw(LOGITS)
            assert logprob == pytest.approx(expected[token], abs=1e-5)
