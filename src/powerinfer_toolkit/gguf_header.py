"""The beginning of a GGUF file: magic, counts, keys and tensor descriptions."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Protocol

from powerinfer_toolkit.gguf_format import ALIGNMENT, TensorType
from powerinfer_toolkit.gguf_keys import PackedKey, packed_string

GGUF_VERSION = 3


class DescribedTensor(Protocol):
    """What the file says of a tensor; `shape` in numpy order, `n_bytes` without padding."""

    @property
    def name(self) -> str:
        """Its name in the file."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first, the contiguous dimension last."""
        ...

    @property
    def type(self) -> TensorType:
        """Its element type."""
        ...

    @property
    def n_bytes(self) -> int:
        """Its size in the file."""
        ...


def gguf_header(
    magic: bytes, keys: Sequence[PackedKey], tensors: Sequence[DescribedTensor]
) -> bytes:
    """Return everything before the data, padded to the alignment."""
    parts = [magic, struct.pack("<IQQ", GGUF_VERSION, len(tensors), len(keys))]
    for key in keys:
        parts += [packed_string(key.name), key.data]
    offset = 0
    for tensor in tensors:
        n_dimensions = len(tensor.shape)
        sizes = struct.pack(f"<I{n_dimensions}Q", n_dimensions, *reversed(tensor.shape))
        parts += [packed_string(tensor.name), sizes, struct.pack("<IQ", tensor.type, offset)]
        offset += padded(tensor.n_bytes)
    header = b"".join(parts)
    return header + bytes(padded(len(header)) - len(header))


def padded(size: int) -> int:
    """Return the next multiple of the alignment."""
    return size + -size % ALIGNMENT
