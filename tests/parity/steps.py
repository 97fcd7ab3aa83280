"""Driving the engine below Model.logits: token by token, in chunks, in several sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.engine import Batch, FfnRule

Logits = NDArray[np.float32]


def run_chunks(
    model: Model,
    tokens: Sequence[int],
    chunk: int,
    *,
    sequence: int = 0,
    rule: FfnRule = FfnRule.AUTO,
) -> Logits:
    """Appends `tokens` to a sequence, `chunk` at a time; [n_tokens, n_vocab]."""
    parts = []
    for begin in range(0, len(tokens), chunk):
        part = np.asarray(tokens[begin : begin + chunk])
        model.engine.run(Batch(part, sequences=sequence, want_logits=True, ffn_rules=rule))
        parts.append(model.engine.logits())
    return np.concatenate(parts)


def decode(model: Model, tokens: Sequence[int]) -> Logits:
    """A fresh sequence 0, one token a step; [n_tokens, n_vocab]."""
    model.engine.kv_truncate(0, 0)
    return run_chunks(model, tokens, 1)


def random_tokens(n_vocab: int, n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, n_vocab, n).tolist()


def bits(logits: Logits) -> bytes:
    """For comparisons bit for bit, in which NaNs would not hide and -0 is not 0."""
    assert np.isfinite(logits).all()
    return logits.tobytes()
