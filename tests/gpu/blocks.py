"""Random rows of every tensor type, without a quantiser: any bits are a value, once the scales are moderate."""

from __future__ import annotations

import numpy as np

from gpu.device import TYPES
from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.native_lib import FloatPtr, pointer

# (elements, bytes, offsets of float16 scales, offsets of 8-bit exponents) of a block
LAYOUTS: dict[str, tuple[int, int, tuple[int, ...], tuple[int, ...]]] = {
    "Q8_0": (32, 34, (0,), ()),
    "Q4_0": (32, 18, (0,), ()),
    "Q4_1": (32, 20, (0, 2), ()),
    "Q5_0": (32, 22, (0,), ()),
    "Q5_1": (32, 24, (0, 2), ()),
    "Q2_K": (256, 84, (80, 82), ()),
    "Q3_K": (256, 110, (108,), ()),
    "Q4_K": (256, 144, (0, 2), ()),
    "Q5_K": (256, 176, (0, 2), ()),
    "Q6_K": (256, 210, (208,), ()),
    "IQ4_NL": (32, 18, (0,), ()),
    "MXFP4": (32, 17, (), (0,)),
    "NVFP4": (64, 36, (), ()),
}


def random_rows(kind: str, n_rows: int, n_cols: int, seed: int) -> np.ndarray:
    """[n_rows, row bytes] of uint8."""
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        values = (rng.standard_normal((n_rows, n_cols)) / np.sqrt(n_cols)).astype(np.float32)
        if kind == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if kind == "F16" else np.float32).view(np.uint8)
    elements, n_bytes, halves, exponents = LAYOUTS[kind]
    blocks = rng.integers(0, 256, (n_rows, n_cols // elements, n_bytes), np.uint8)
    for offset in halves:
        scale = rng.uniform(0.5, 1, blocks.shape[:2]) * rng.choice([-0.01, 0.01], blocks.shape[:2])
        blocks[..., offset : offset + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    for offset in exponents:
        blocks[..., offset] = rng.integers(118, 124, blocks.shape[:2])
    return blocks.reshape(n_rows, -1)


def values_of(kind: str, rows: np.ndarray, n_cols: int) -> np.ndarray:
    """[n_rows, n_cols] float32 as the scalar kernels read them."""
    out = np.full((len(rows), n_cols), np.nan, np.float32)
    for row, to in zip(rows, out, strict=True):
        native_lib.load().pi_kernel_dequantize(
            b"scalar", TYPES[kind], row.ctypes.data, 0, n_cols, pointer(to, FloatPtr)
        )
    return out
