"""A GGUF or PWRI file read with gguf-py: keys and dequantised float64 tensors."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class GgufFile:
    """Keys and tensors of one file; tensors are dequantised once and kept as float64."""

    def __init__(self, path: Path) -> None:
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._cache: dict[str, Array] = {}

    def key(self, name: str, default: Any = None) -> Any:
        field = self._reader.get_field(name)
        return default if field is None else field.contents()

    def has(self, name: str) -> bool:
        return name in self._tensors

    def type_of(self, name: str) -> gguf.GGMLQuantizationType:
        return self._tensors[name].tensor_type

    def tensor(self, name: str) -> Array:
        """Float64 values, row-major: [n_rows, n_cols] for a matrix."""
        if name not in self._cache:
            stored = self._tensors[name]
            values = gguf.quants.dequantize(stored.data, stored.tensor_type)
            self._cache[name] = values.astype(np.float64)
        return self._cache[name]


def _open(path: Path) -> gguf.GGUFReader:
    """gguf-py refuses the magic PWRI, so such a file is read from a copy that says GGUF."""
    if _magic(path) != b"PWRI":
        return gguf.GGUFReader(path)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy.gguf"
        shutil.copyfile(path, copy)
        patch_magic(copy, b"GGUF")
        return gguf.GGUFReader(copy)


def patch_magic(path: Path, magic: bytes) -> None:
    with path.open("r+b") as file:
        file.write(magic)


def _magic(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4)
