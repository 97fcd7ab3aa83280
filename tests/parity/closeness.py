"""How far logits are apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def relative_l2(got: ArrayLike, want: ArrayLike) -> float:
    """|got - want| / |want| over all positions together."""
    want64 = np.asarray(want, dtype=np.float64)
    difference = np.asarray(got, dtype=np.float64) - want64
    return float(np.linalg.norm(difference) / np.linalg.norm(want64))


def log_softmax(logits: ArrayLike) -> np.ndarray:
    x = np.asarray(logits, dtype=np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def mean_kl(got: ArrayLike, want: ArrayLike) -> float:
    """Mean over positions of KL(want || got), in nats. Logits [n_tokens, n_vocab]."""
    p, q = log_softmax(want), log_softmax(got)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())
