"""Tensor elements as source files store them, and their way to float32 and to the output types."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import TensorType

Array = NDArray[Any]

# safetensors' names; BF16 is kept as the upper half of a float32
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
}
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")

# Largest magnitude that each type can hold: of the elements, or of a block's float16 scale times its
# largest quant.
_F16_MAX = 65504.0
_LIMITS = {
    TensorType.F32: float(np.finfo(np.float32).max),
    TensorType.BF16: float(np.uint32(0x7F7F0000).view(np.float32)),
    TensorType.F16: _F16_MAX,
    TensorType.Q8_0: _F16_MAX * 127,
    TensorType.Q4_0: _F16_MAX * 8,
}


@dataclass(frozen=True)
class Entry:
    """What a source file says of a tensor: element type by its safetensors name, and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RawTensor:
    """A row-major tensor in its source type; `data` has the tensor's shape, BF16 as uint16."""

    dtype: str
    data: Array


class TensorFile(Protocol):
    """A file of named tensors that reads them one at a time."""

    entries: dict[str, Entry]

    def read(self, name: str) -> RawTensor:
        """Return one tensor; the file holds no reference to it."""
        ...


def to_float32(data: Array, dtype: str) -> NDArray[np.float32]:
    """Return elements of a weight type as contiguous float32, exactly (float64 is rounded)."""
    if dtype == "BF16":
        return (np.ascontiguousarray(data).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, which encode() refuses
        return np.ascontiguousarray(data, dtype=np.float32)


def n_bytes(tensor_type: TensorType, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in the file; the last dimension is a multiple of the type's block."""
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor_type)]
    return math.prod(shape) // block_elements * block_bytes


def block_elements(tensor_type: TensorType) -> int:
    """Return how many neighbours of a row share a block."""
    return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor_type)][0])


def check_block(name: str, tensor_type: TensorType, n_columns: int) -> None:
    """Refuse a quantised type for rows that are no whole number of blocks."""
    block = block_elements(tensor_type)
    if n_columns % block:
        raise PiError(
            f"{name} has rows of {n_columns} elements; {tensor_type.name} needs a multiple of {block}",
            hint="--outtype f16 or bf16 takes any size",
        )


def encode(rows: NDArray[np.float32], tensor_type: TensorType, name: str) -> tuple[Array, float]:
    """Return `rows` [n, n_columns] in the output type, bit-equal to gguf-py, and their largest magnitude.

    Raises PiError when an element is not finite or beyond the type's range.
    """
    peak = float(max(rows.max(), -rows.min())) if rows.size else 0.0
    if not math.isfinite(peak):
        raise PiError(
            f"{name} holds NaN or infinite weights", hint="the checkpoint is damaged; get it again"
        )
    if peak > _LIMITS[tensor_type]:
        raise PiError(
            f"{name} holds {peak:.6g}, beyond the range of {tensor_type.name}",
            hint="--outtype bf16 has the range of float32",
        )
    return gguf.quants.quantize(rows, gguf.GGMLQuantizationType(tensor_type)), peak
