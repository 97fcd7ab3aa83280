"""Write a GGUF file, one tensor at a time and each in blocks of rows, so that memory stays bounded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import gguf
import numpy as np

from powerinfer_toolkit import console
from powerinfer_toolkit.convert.elements import encode
from powerinfer_toolkit.convert.layout import OutputTensor
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import ALIGNMENT, GGUF_MAGIC
from powerinfer_toolkit.tokenizer_keys import MetadataEntry

_HASH_CHARACTERS = 64  # of a SHA-256 in hexadecimal


def placeholder(role: str) -> str:
    """Return what stands in the header for a hash that is known only when all data has been read."""
    return f"<sha256 of {role}>".ljust(_HASH_CHARACTERS, "-")


def total_bytes(tensors: Iterable[OutputTensor]) -> int:
    """Return the size of the tensor data with padding."""
    return sum(_padded(tensor.n_bytes) for tensor in tensors)


def write_gguf(
    path: Path,
    magic: bytes,
    architecture: str,
    keys: Sequence[MetadataEntry],
    tensors: Sequence[OutputTensor],
    hashes: Callable[[], dict[str, str]],
) -> None:
    """Write `path`, GGUF version 3 with the first four bytes `magic`.

    `hashes` is called after the last tensor and gives role -> SHA-256, put where placeholder(role) stands.
    Raises PiError for weights that cannot be represented and for a disk that is too small.
    """
    _check_space(path, total_bytes(tensors))
    _write_header(path, architecture, keys, tensors)
    header_bytes = path.stat().st_size
    with path.open("r+b") as stream:
        stream.seek(0, 2)
        stream.write(bytes(-header_bytes % ALIGNMENT))
        for tensor in console.progress(tensors, total=len(tensors), label="convert", unit="tensor"):
            _write_tensor(stream, tensor)
        stream.seek(0)
        header = stream.read(header_bytes)
        for role, digest in hashes().items():
            header = header.replace(placeholder(role).encode(), digest.encode())
        stream.seek(0)
        stream.write(magic + header[len(GGUF_MAGIC) :])


def _write_header(
    path: Path, architecture: str, keys: Sequence[MetadataEntry], tensors: Sequence[OutputTensor]
) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    for entry in keys:
        writer.add_key_value(entry.name, entry.value, entry.value_type, entry.element_type)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            np.dtype(np.float32),  # of no meaning beside raw_dtype, but uint8
            tensor.n_bytes,
            raw_dtype=gguf.GGMLQuantizationType(tensor.type),
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _write_tensor(stream: BinaryIO, tensor: OutputTensor) -> None:
    begin, peak = stream.tell(), 0.0
    for block in tensor.blocks():
        encoded, block_peak = encode(block, tensor.type, tensor.name)
        stream.write(encoded.data)
        peak = max(peak, block_peak)
    if tensor.never_zero and peak == 0.0:
        raise PiError(f"{tensor.name} is all zero: no trained predictor")
    if stream.tell() - begin != tensor.n_bytes:
        raise PiError(f"{tensor.name} gave {stream.tell() - begin} bytes, not {tensor.n_bytes}")
    stream.write(bytes(-tensor.n_bytes % ALIGNMENT))


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT


def _check_space(path: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < needed_bytes:
        raise PiError(
            f"the output needs {needed_bytes / 1e9:.2f} GB and {path.parent} has {free_bytes / 1e9:.2f} GB free",
            hint="free some space, write elsewhere or take a smaller --outtype",
        )
