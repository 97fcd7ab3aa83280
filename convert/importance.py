"""llama.cpp's importance matrix: how much each column of a matrix matters to what the model computes.

Both of its formats: GGUF (tensors NAME.in_sum2 and NAME.counts, sums of squared inputs) and the binary one
before it (int32 number of entries; of each: int32 length and name, int32 calls, int32 length, float32 sums).
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.convert.elements import to_float32
from powerinfer_toolkit.convert.gguf_file import GgufFile, damaged
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import GGUF_MAGIC, Tensor

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_BYTES = 1 << 30
# Nobody measures the inputs of these: token_embd is looked up, the head is left out unless asked for, and in
# ffn_down_t a neuron is a row, where one weight for all columns changes nothing.
_OPTIONAL = (Tensor.TOKEN_EMBD, Tensor.OUTPUT)
_TRANSPOSED, _AS_MEASURED = "ffn_down_t.", "ffn_down."


@dataclass(frozen=True)
class ImportanceMatrix:
    """Mean squared input of each column [n_columns] by GGUF tensor name, numbered as in the source."""

    name: str
    sha256: str
    entries: dict[str, NDArray[np.float32]]

    def columns(self, tensor: str, n_columns: int) -> NDArray[np.float32] | None:
        """Return the weights for the columns of a matrix, None for those that need none.

        Raises PiError where they are missing or of another length.
        """
        if _TRANSPOSED in tensor:
            return None
        found = self.entries.get(tensor)
        if found is None and tensor not in _OPTIONAL:
            raise PiError(
                f"{self.name} says nothing of {tensor}",
                hint="is this the importance matrix of another model?",
            )
        if found is not None and found.shape != (n_columns,):
            raise PiError(
                f"{self.name}: {tensor} has {found.size} columns; this model's has {n_columns}",
                hint="is this the importance matrix of another model?",
            )
        return found

    def check_names(self, tensors: set[str]) -> None:
        """Refuse entries for matrices that are not among an output's `tensors`."""
        known = tensors | {name.replace(_TRANSPOSED, _AS_MEASURED) for name in tensors}
        unknown = sorted(set(self.entries) - known)
        if unknown:
            raise PiError(
                f"{self.name} has weights for {unknown[0]}, which this model lacks",
                hint="is this the importance matrix of another model?",
            )


def read_importance(path: Path) -> ImportanceMatrix:
    """Read an importance matrix in either format. Raises PiError for a file that is none."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise damaged(path, f"{size} bytes are too many for an importance matrix")
    data = path.read_bytes()
    is_gguf = data[:4] == GGUF_MAGIC
    entries = _from_gguf(GgufFile(path)) if is_gguf else _from_binary(path, data)
    if not entries:
        raise damaged(path, "no importance matrix")
    for name, values in entries.items():
        if not np.isfinite(values).all() or (values < 0).any() or not values.any():
            raise damaged(path, f"the weights of {name} are negative, not finite or all zero")
    return ImportanceMatrix(path.name, hashlib.sha256(data).hexdigest(), entries)


def _from_gguf(file: GgufFile) -> dict[str, NDArray[np.float32]]:
    names = [name.removesuffix(_SUMS) for name in file.entries if name.endswith(_SUMS)]
    return {name: _mean(file, name) for name in names}


def _mean(file: GgufFile, name: str) -> NDArray[np.float32]:
    """Return sums over counts; columns that were never seen count alike."""
    if name + _COUNTS not in file.entries:
        raise damaged(file.path, f"{name} has sums and no counts")
    raws = (file.read(name + part) for part in (_SUMS, _COUNTS))
    sums, counts = (to_float32(raw.data, raw.dtype).reshape(-1) for raw in raws)
    if counts.size != 1:
        raise PiError(
            f"{file.path}: {name} has {counts.size} experts",
            hint="a mixture of experts is not supported",
        )
    return sums / counts[0] if counts[0] > 0 else np.ones_like(sums)


def _from_binary(path: Path, data: bytes) -> dict[str, NDArray[np.float32]]:
    """Read the older format; what follows its entries names the text they were measured on."""
    entries: dict[str, NDArray[np.float32]] = {}
    at = 4
    try:
        (n_entries,) = struct.unpack_from("<i", data)
        for _ in range(n_entries):
            (length,) = struct.unpack_from("<i", data, at)
            name = struct.unpack_from(f"{length}s", data, at + 4)[0].decode()
            n_calls, n_columns = struct.unpack_from("<ii", data, at + 4 + length)
            if n_columns < 1:
                raise ValueError(name)
            sums = np.frombuffer(data, "<f4", n_columns, at + 12 + length)
            entries[name] = (sums / max(n_calls, 1)).astype(np.float32)
            at += 12 + length + 4 * n_columns
    except (struct.error, ValueError, OverflowError) as failure:
        raise damaged(path, "no importance matrix, or cut short") from failure
    return entries
