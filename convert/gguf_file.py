"""Read GGUF files, PowerInfer's magic included: keys at once, one tensor at a time, with bounded reads.

Every count and length is checked against the bytes that are left before anything of that size is read. Plain
reads, no mmap: a file cut short is an error instead of a signal.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGUFValueType as ValueType

from powerinfer_toolkit.convert.elements import (
    NUMPY_DTYPES,
    PACKED,
    Entry,
    RawTensor,
)
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import ALIGNMENT, GGUF_MAGIC, PWRI_MAGIC, TensorType
from powerinfer_toolkit.gguf_keys import SCALARS, PackedKey
from powerinfer_toolkit.gguf_types import block_elements, n_bytes

_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 1 << 16
_MAX_NESTING = 4  # of arrays in arrays
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_ALIGNMENT_KEY = "general.alignment"


class GgufFile:
    """One GGUF file: `magic`, `keys` by name, `entries` of all its tensors, and read().

    Shapes are in numpy order. Raises PiError for a file that is damaged, cut short, or has a tensor of a type
    that this toolkit does not know.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, PackedKey] = {}
        self.entries: dict[str, Entry] = {}
        self._begins: dict[str, int] = {}
        with path.open("rb") as stream:
            cursor = _Cursor(path, stream)
            self.magic = cursor.read(4)
            n_tensors, n_keys = self._read_counts(cursor)
            for _ in range(n_keys):
                self._read_key(cursor)
            offsets = [self._read_description(cursor) for _ in range(n_tensors)]
            self._place(offsets, cursor)

    def _read_counts(self, cursor: _Cursor) -> tuple[int, int]:
        """Return the numbers of tensors and keys."""
        if self.magic not in (GGUF_MAGIC, PWRI_MAGIC):
            raise PiError(
                f"{self.path} is neither a directory nor a GGUF file",
                hint="name a checkpoint's directory, a .gguf file or a hub id",
            )
        version = cursor.integer("I")
        if version not in (2, 3):
            raise PiError(
                f"{self.path} is GGUF of version {version}",
                hint="this toolkit reads versions 2 and 3",
            )
        n_tensors, n_keys = cursor.integer("Q"), cursor.integer("Q")
        cursor.demand(n_tensors * _MIN_TENSOR_BYTES + n_keys * _MIN_KEY_BYTES)
        return n_tensors, n_keys

    def _read_key(self, cursor: _Cursor) -> None:
        name = cursor.name()
        begin = cursor.position
        cursor.skip_value(cursor.value_type())
        if name in self.keys:
            raise damaged(self.path, f"key {name} stands there twice")
        self.keys[name] = PackedKey(name, cursor.between(begin))

    def _read_description(self, cursor: _Cursor) -> tuple[str, int]:
        """Take one tensor's type and shape; return its name and offset."""
        name = cursor.name()
        n_dimensions = cursor.integer("I")
        if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
            raise damaged(self.path, f"tensor {name} has {n_dimensions} dimensions")
        shape = tuple(cursor.integer("Q") for _ in range(n_dimensions))[::-1]
        tensor_type = _known_type(self.path, name, cursor.integer("I"))
        if name in self.entries:
            raise damaged(self.path, f"tensor {name} stands there twice")
        if shape[-1] % block_elements(tensor_type):
            raise damaged(self.path, f"tensor {name} has rows of {shape[-1]}, no whole blocks")
        self.entries[name] = Entry(tensor_type.name, shape)
        return name, cursor.integer("Q")

    def _place(self, offsets: list[tuple[str, int]], cursor: _Cursor) -> None:
        """Find where each tensor begins, and check that the file holds it whole."""
        alignment = self.value(_ALIGNMENT_KEY, ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise damaged(self.path, f"{_ALIGNMENT_KEY} is {alignment!r:.40}, no power of two")
        data = -(-cursor.position // alignment) * alignment
        for name, offset in offsets:
            entry = self.entries[name]
            end = data + offset + n_bytes(TensorType[entry.dtype], entry.shape)
            if min(entry.shape) < 1 or end > cursor.size:
                raise damaged(self.path, f"cut short: {name} ends at byte {end} of {cursor.size}")
            self._begins[name] = data + offset

    def value(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - the type is the file's
        """Return a key's value, `default` where there is none."""
        return self.keys[name].value() if name in self.keys else default

    def read(self, name: str) -> RawTensor:
        """Return one tensor in its own type."""
        entry = self.entries[name]
        packed = entry.dtype in PACKED
        dtype = np.dtype(np.uint8) if packed else NUMPY_DTYPES[entry.dtype]
        count = n_bytes(TensorType[entry.dtype], entry.shape) // dtype.itemsize
        data = np.fromfile(self.path, dtype, count=count, offset=self._begins[name])
        if data.size != count:
            raise damaged(self.path, f"cut short while {name} was read")
        shape = (math.prod(entry.shape[:-1]), -1) if packed else entry.shape
        return RawTensor(entry.dtype, data.reshape(shape))


class _Cursor:
    """A position in an open file; a read beyond its end is a PiError before anything is allocated."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path = path
        self.size = os.fstat(stream.fileno()).st_size
        self.position = 0
        self._stream = stream

    def demand(self, count: int) -> None:
        """Refuse the file unless `count` bytes are left."""
        if count > self.size - self.position:
            raise damaged(self.path, "cut short, or damaged in its header")

    def read(self, count: int) -> bytes:
        """Return the next bytes."""
        self.demand(count)
        data = self._stream.read(count)
        if len(data) != count:
            raise damaged(self.path, "cut short while it was read")
        self.position += count
        return data

    def skip(self, count: int) -> None:
        """Go on without reading."""
        self.demand(count)
        self._stream.seek(count, os.SEEK_CUR)
        self.position += count

    def between(self, begin: int) -> bytes:
        """Return what lies between an earlier position and here."""
        end = self.position
        self._stream.seek(begin)
        self.position = begin
        return self.read(end - begin)

    def integer(self, code: str) -> int:
        """Return a number by its struct code."""
        value: int = struct.unpack("<" + code, self.read(struct.calcsize(code)))[0]
        return value

    def name(self) -> str:
        """Return the name of a key or a tensor."""
        length = self.integer("Q")
        if length > _MAX_NAME_BYTES:
            raise damaged(self.path, f"a name of {length} bytes")
        try:
            return self.read(length).decode()
        except UnicodeDecodeError as failure:
            raise damaged(self.path, "a name that is no UTF-8") from failure

    def value_type(self) -> ValueType:
        """Return the type of the value that follows."""
        number = self.integer("I")
        try:
            return ValueType(number)
        except ValueError as failure:
            raise damaged(self.path, f"value type {number} is unknown") from failure

    def skip_value(self, value_type: ValueType, depth: int = 0) -> None:
        """Go past a value of metadata."""
        if value_type is ValueType.STRING:
            self.skip(self.integer("Q"))
        elif value_type is not ValueType.ARRAY:
            self.skip(struct.calcsize(SCALARS[value_type]))
        elif depth == _MAX_NESTING:
            raise damaged(self.path, "arrays nested too deeply")
        else:
            self._skip_array(depth)

    def _skip_array(self, depth: int) -> None:
        element_type, count = self.value_type(), self.integer("Q")
        if element_type in SCALARS:
            self.skip(count * struct.calcsize(SCALARS[element_type]))
            return
        self.demand(8 * count)  # a string or an array has its length at least
        for _ in range(count):
            self.skip_value(element_type, depth + 1)


def _known_type(path: Path, name: str, number: int) -> TensorType:
    try:
        return TensorType(number)
    except ValueError as failure:
        known = {int(member): member.name for member in gguf.GGMLQuantizationType}
        raise PiError(
            f"{path}: tensor {name} has the unsupported type {known.get(number, number)}",
            hint=f"supported: {', '.join(member.name for member in TensorType)}",
        ) from failure


def damaged(path: Path, what: str) -> PiError:
    """Return the failure of a file that is not what it says."""
    return PiError(f"{path}: {what}", hint="get the file again")
