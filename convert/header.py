"""The beginning of a GGUF file: magic, counts, keys and tensor descriptions."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from powerinfer_toolkit.convert.gguf_keys import PackedKey, packed_string
from powerinfer_toolkit.convert.layout import OutputTensor
from powerinfer_toolkit.gguf_format import ALIGNMENT

GGUF_VERSION = 3


def gguf_header(magic: bytes, keys: Sequence[PackedKey], tensors: Sequence[OutputTensor]) -> bytes:
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
