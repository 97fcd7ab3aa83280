"""Write a GGUF file, one tensor at a time and each in blocks of rows, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from powerinfer_toolkit import console
from powerinfer_toolkit.artifact import check_space
from powerinfer_toolkit.convert.encoding import encode
from powerinfer_toolkit.convert.layout import OutputTensor
from powerinfer_toolkit.convert.roles import placeholder
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import ALIGNMENT
from powerinfer_toolkit.gguf_header import gguf_header, padded
from powerinfer_toolkit.gguf_keys import PackedKey


def write_gguf(
    path: Path,
    magic: bytes,
    keys: Sequence[PackedKey],
    tensors: Sequence[OutputTensor],
    hashes: Callable[[], dict[str, str]],
    *,
    allow_nonfinite: bool = False,
) -> None:
    """Write `path`, GGUF version 3 with the first four bytes `magic`.

    `hashes` is called after the last tensor and gives role -> SHA-256, put where placeholder(role) stands.
    Raises PiError for weights that cannot be represented and for a disk that is too small.
    """
    header = gguf_header(magic, keys, tensors)
    check_space(path, len(header) + sum(padded(tensor.n_bytes) for tensor in tensors))
    nonfinite: dict[str, int] = {}
    with path.open("wb") as stream:
        stream.write(header)
        for tensor in console.progress(tensors, total=len(tensors), label="convert", unit="tensor"):
            n_nonfinite = _write_tensor(stream, tensor, allow_nonfinite)
            if n_nonfinite:
                nonfinite[tensor.name] = n_nonfinite
        for role, digest in hashes().items():
            header = header.replace(placeholder(role).encode(), digest.encode())
        stream.seek(0)
        stream.write(header)
    _warn_of_nonfinite(nonfinite)


def _write_tensor(stream: BinaryIO, tensor: OutputTensor, allow_nonfinite: bool) -> int:
    """Write one tensor with its padding; return how many of its weights are not finite."""
    begin, peak, n_nonfinite = stream.tell(), 0.0, 0
    for block in tensor.blocks():
        encoded = encode(
            block.values,
            tensor.type,
            tensor.name,
            packed=block.packed,
            importance=tensor.importance,
            allow_nonfinite=allow_nonfinite,
        )
        stream.write(encoded.data.data)
        peak, n_nonfinite = max(peak, encoded.peak), n_nonfinite + encoded.n_nonfinite
    if tensor.never_zero and peak == 0.0:
        raise PiError(
            f"{tensor.name} is all zero: no trained predictor",
            hint="train it, or leave the predictors out",
        )
    if stream.tell() - begin != tensor.n_bytes:
        raise PiError(
            f"{tensor.name} gave {stream.tell() - begin} bytes, not {tensor.n_bytes}",
            hint="did its file change while it was read?",
        )
    stream.write(bytes(-tensor.n_bytes % ALIGNMENT))
    return n_nonfinite


def _warn_of_nonfinite(counts: dict[str, int]) -> None:
    if counts:
        console.warning(
            f"{sum(counts.values())} weights in {len(counts)} tensors are NaN or infinite, the first in "
            f"{next(iter(counts))}: kept in F32, F16, BF16 and copied blocks, else written as 0"
        )
