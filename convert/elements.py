"""Tensor elements as source files store them, and their way to float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.gguf_types import is_packed

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

PACKED = {t.name: t for t in TensorType if is_packed(t)}  # several elements share a block


@dataclass(frozen=True)
class Entry:
    """What a source file says of a tensor: element type by its name there, and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RawTensor:
    """A row-major tensor in its source type.

    `data` has the tensor's shape, BF16 as uint16; of a type in PACKED it holds the bytes, uint8
    [n_rows, row_bytes].
    """

    dtype: str
    data: Array


class TensorFile(Protocol):
    """A file of named tensors that reads them one at a time."""

    entries: dict[str, Entry]

    def read(self, name: str) -> RawTensor:
        """Return one tensor; the file holds no reference to it."""
        ...


def to_float32(data: Array, dtype: str) -> NDArray[np.float32]:
    """Return rows of a weight type as contiguous float32, exactly (float64 is rounded)."""
    if dtype == "BF16":
        return (np.ascontiguousarray(data).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # encode() judges what is not finite
        if dtype in PACKED:
            packed = np.ascontiguousarray(data)
            values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[dtype])
            return np.ascontiguousarray(values, dtype=np.float32)
        return np.ascontiguousarray(data, dtype=np.float32)
