"""Rotary embedding between conventions: row order of q and k, and llama3's frequency factors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.convert.config import Rope


def interleaved_rows(n_heads: int, head_dim: int) -> NDArray[np.int64]:
    """Return the source row of every row of a q or k projection, [n_heads * head_dim].

    transformers rotates element i of a head with element i + head_dim / 2, GGUF's llama rotates 2 i with
    2 i + 1. Row 2 i of a head is therefore the source's row i, row 2 i + 1 its row i + head_dim / 2.
    """
    halves = np.arange(n_heads * head_dim).reshape(n_heads, 2, head_dim // 2)
    return halves.swapaxes(1, 2).reshape(-1)


def llama3_factors(rope: Rope, head_dim: int) -> NDArray[np.float32]:
    """Return what the angle of each pair is divided by, [head_dim / 2] (tensor rope_freqs).

    The Llama 3.1 rule on wavelengths w = 2 pi / frequency, with c the original context: 1 where w is below
    c / high_freq_factor, `factor` where it is above c / low_freq_factor; in between the frequency is the mean
    of f and f / factor that goes linearly in c / w.
    """
    frequency = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = (
        rope.original_context * frequency / (2 * np.pi)
    )  # full turns within the original context
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(share, 0.0, 1.0)
    return (1.0 / (kept + (1.0 - kept) / rope.factor)).astype(np.float32)
