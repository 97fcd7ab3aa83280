"""Read safetensors files one tensor at a time, with numpy alone (bfloat16 included).

Format: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, data. Plain reads, no mmap: a file
cut short is an error instead of a signal, and pages that were read do not count as the process's memory.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer_toolkit.convert.elements import NUMPY_DTYPES, Entry, RawTensor
from powerinfer_toolkit.errors import PiError

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation


class SafetensorsFile:
    """One safetensors file: `entries` of all its tensors, `metadata`, and read().

    Raises PiError for a file that is damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        header, self._data_begin = _read_header(path)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._begins: dict[str, int] = {}
        self.entries: dict[str, Entry] = {}
        data_bytes = path.stat().st_size - self._data_begin
        for name, described in header.items():
            self._add(name, described, data_bytes)

    def _add(self, name: str, described: dict[str, Any], data_bytes: int) -> None:
        try:
            dtype, shape = str(described["dtype"]), tuple(described["shape"])
            begin, end = described["data_offsets"]
            numbers = (*shape, begin, end)
            in_order = all(type(n) is int and n >= 0 for n in numbers) and begin <= end
        except (TypeError, KeyError, ValueError) as failure:
            raise _damaged(self._path, f"tensor {name} is not described properly") from failure
        if not in_order:
            raise _damaged(self._path, f"tensor {name} is not described properly")
        if end > data_bytes:
            raise _damaged(
                self._path, f"cut short: {name} ends at byte {end} of {data_bytes} bytes of data"
            )
        known = NUMPY_DTYPES.get(dtype)
        if known is not None and math.prod(shape) * known.itemsize != end - begin:
            raise _damaged(
                self._path, f"tensor {name} has {end - begin} bytes, not its shape's size"
            )
        self._begins[name] = begin
        self.entries[name] = Entry(dtype, shape)

    def read(self, name: str) -> RawTensor:
        """Return one tensor in its own type."""
        entry = self.entries[name]
        if entry.dtype not in NUMPY_DTYPES:
            raise PiError(
                f"{self._path}: {name} has the unsupported type {entry.dtype}",
                hint=f"supported: {', '.join(NUMPY_DTYPES)}",
            )
        count = math.prod(entry.shape)
        offset = self._data_begin + self._begins[name]
        data = np.fromfile(self._path, NUMPY_DTYPES[entry.dtype], count=count, offset=offset)
        if data.size != count:
            raise _damaged(self._path, f"cut short while {name} was read")
        return RawTensor(entry.dtype, data.reshape(entry.shape))


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the parsed header and the offset of the data."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length < 2 or length > min(MAX_HEADER_BYTES, path.stat().st_size - 8):
            raise _damaged(path, "no safetensors file, or cut short in its header")
        try:
            header = json.loads(stream.read(length))
        except (ValueError, RecursionError) as failure:
            raise _damaged(path, "its header is not JSON") from failure
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise _damaged(path, "its header is not a JSON object")
    return header, 8 + length


def _damaged(path: Path, what: str) -> PiError:
    return PiError(f"{path}: {what}", hint="get the file again")
