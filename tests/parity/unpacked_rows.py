"""Rows of random bytes in every block type, and what a quant of 0 is worth in them."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from parity import native_kernels as kernels

# Where a block has its float16 scales, so that random bytes can be given finite ones.
HALVES = {
    Type.Q8_0: (0,),
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.MXFP4: (),
    Type.NVFP4: (),
}

# Where a block has its quants, so that they can be set to 0. None: signed, no minimum.
QUANTS = {
    Type.Q8_0: None,
    Type.Q4_0: slice(2, 18),
    Type.Q4_1: slice(4, 20),
    Type.Q5_0: slice(2, 22),
    Type.Q5_1: slice(4, 24),
    Type.Q2_K: slice(16, 80),
    Type.Q3_K: slice(0, 96),
    Type.Q4_K: slice(16, 144),
    Type.Q5_K: slice(16, 176),
    Type.Q6_K: slice(0, 192),
    Type.IQ4_NL: None,
    Type.MXFP4: None,
}


def random_rows(kind: Type, n_rows: int = 9, n_cols: int = 768, seed: int = 0) -> np.ndarray:
    """Rows of random bytes, every quant and packed scale among them, with float16 scales near 1."""
    rng = np.random.default_rng(seed)
    elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n_rows, n_cols // elements, n_bytes), dtype=np.uint8)
    for offset in HALVES[kind]:
        halves = rng.normal(size=blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = halves[..., None].view(np.uint8)
    if kind is Type.MXFP4:
        blocks[..., 0] = rng.integers(100, 150, blocks.shape[:2])
        blocks[:2, 0, 0] = (0, 1)[:n_rows]  # the subnormal scales
    return np.ascontiguousarray(blocks.reshape(n_rows, -1))


def minima(rows: np.ndarray, kind: Type) -> np.ndarray:
    """The value of a quant of 0, for every element."""
    if QUANTS[kind] is None:
        return np.zeros(1)
    blocks = rows.reshape(len(rows), -1, gguf.GGML_QUANT_SIZES[kind][1]).copy()
    blocks[..., QUANTS[kind]] = 0
    return kernels.dequantise(blocks.reshape(rows.shape), kind).astype(np.float64)
