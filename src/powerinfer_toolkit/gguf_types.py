"""Tensor types as bytes: sizes of blocks, and the way from float32 to every type that is written.

The quantisers give the bits of ggml's reference (tests/convert/test_types.py compares them).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.gguf_format import TensorType

Array = NDArray[Any]

_SIZES = {t: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(t)] for t in TensorType}
# Types whose quantiser weighs errors by an importance matrix.
WEIGHED = (
    TensorType.Q4_0,
    TensorType.Q4_1,
    TensorType.Q5_0,
    TensorType.Q5_1,
    TensorType.Q2_K,
    TensorType.Q3_K,
    TensorType.Q4_K,
    TensorType.Q5_K,
    TensorType.Q6_K,
    TensorType.IQ4_NL,
)
_ONLY_LIBGGUF = WEIGHED[4:]  # gguf-py reads these, and does not write them


def n_bytes(tensor_type: TensorType, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in the file; the last dimension is a multiple of the type's block."""
    n_elements, block_bytes = _SIZES[tensor_type]
    return math.prod(shape) // n_elements * block_bytes


def block_elements(tensor_type: TensorType) -> int:
    """Return how many neighbours of a row share a block."""
    return _SIZES[tensor_type][0]


def is_packed(tensor_type: TensorType) -> bool:
    """Return whether elements share blocks: whether the type is a quantised one."""
    return block_elements(tensor_type) > 1


def predictor_types(ffn: Collection[TensorType]) -> tuple[TensorType, TensorType]:
    """Return the types of a predictor's fc1 and fc2 beside gate, up and down of the types `ffn`.

    F16, where those have any quantised type Q8_0, and fc2 Q5_0 where they have no more bits than that: all three
    cost nothing that a perplexity shows; fewer bits, or fc1 below Q8_0, do (docs/LOG.md).
    """
    if not any(map(is_packed, ffn)):
        return TensorType.F16, TensorType.F16
    bits = max(n_bytes(tensor_type, (256,)) for tensor_type in ffn)
    coarse = bits <= n_bytes(TensorType.Q5_0, (256,))
    return TensorType.Q8_0, TensorType.Q5_0 if coarse else TensorType.Q8_0


def quantise(
    rows: NDArray[np.float32],
    tensor_type: TensorType,
    importance: NDArray[np.float32] | None = None,
) -> Array:
    """Return rows [n, n_columns] in a type: gguf-py's quantisers where it has them, libgguf's for the rest.

    Packed types come as bytes [n, row_bytes], F16 as float16, BF16 as bytes. `importance` [n_columns] weighs the
    errors of the types in WEIGHED.
    """
    if tensor_type in _ONLY_LIBGGUF or (importance is not None and tensor_type in WEIGHED):
        import libgguf  # only those who write these types need it

        def quantise_part(part: NDArray[np.float32]) -> Array:
            encoded: Array = libgguf.quantize_rows(part, int(tensor_type), importance)
            return encoded

        return _in_threads(quantise_part, rows)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for what overflowed
        encoded: Array = gguf.quants.quantize(rows, gguf.GGMLQuantizationType(tensor_type))
    return encoded


def _in_threads(
    quantise: Callable[[NDArray[np.float32]], Array], rows: NDArray[np.float32]
) -> Array:
    """Quantise every row, rows dealt out to all processors; each row's bits depend on that row alone."""
    n_parts = min(os.cpu_count() or 1, len(rows))
    if n_parts < 2:
        return quantise(rows)
    with ThreadPoolExecutor(n_parts) as pool:
        return np.concatenate(list(pool.map(quantise, np.array_split(rows, n_parts))))
