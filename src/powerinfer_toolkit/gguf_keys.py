"""GGUF metadata keys as bytes: unpacked where somebody asks for a value, packed to be written.

Keys of a source file stay bytes on their way to the output, so that what nobody here knows is kept as it is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from gguf import GGUFValueType as ValueType

from powerinfer_toolkit.tokenizer_keys import MetadataEntry

SCALARS = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class PackedKey:
    """A key's name and its value as it stands in a file: u32 value type, value."""

    name: str
    data: bytes

    def value(self) -> Any:  # noqa: ANN401 - the type is the file's
        """Return int, float, bool, str or a list of one of them; text that is no UTF-8 has U+FFFD."""
        value_type = ValueType(int.from_bytes(self.data[:4], "little"))
        return _unpack(self.data, 4, value_type)[0]


def _unpack(data: bytes, at: int, value_type: ValueType) -> tuple[Any, int]:
    """Return the value that begins at byte `at`, and where it ends. The data is known to be whole."""
    if value_type is ValueType.STRING:
        begin = at + 8
        end = begin + int.from_bytes(data[at:begin], "little")
        return data[begin:end].decode("utf-8", "replace"), end
    if value_type is not ValueType.ARRAY:
        code = "<" + SCALARS[value_type]
        return struct.unpack_from(code, data, at)[0], at + struct.calcsize(code)
    element_type, count = struct.unpack_from("<IQ", data, at)
    element_type, at = ValueType(element_type), at + 12
    if element_type in SCALARS:
        code = f"<{count}{SCALARS[element_type]}"
        return list(struct.unpack_from(code, data, at)), at + struct.calcsize(code)
    values = []
    for _ in range(count):
        value, at = _unpack(data, at, element_type)
        values.append(value)
    return values, at


def pack(entry: MetadataEntry) -> PackedKey:
    """Return a key ready to be written."""
    data = struct.pack("<I", entry.value_type)
    if entry.value_type is ValueType.STRING:
        data += packed_string(entry.value)
    elif entry.value_type is not ValueType.ARRAY:
        data += struct.pack("<" + SCALARS[entry.value_type], entry.value)
    elif entry.element_type is ValueType.STRING:
        data += struct.pack("<IQ", entry.element_type, len(entry.value))
        data += b"".join(map(packed_string, entry.value))
    elif entry.element_type is not None:
        code = SCALARS[entry.element_type]
        data += struct.pack("<IQ", entry.element_type, len(entry.value))
        data += struct.pack(f"<{len(entry.value)}{code}", *entry.value)
    return PackedKey(entry.name, data)


def packed_string(text: str) -> bytes:
    """Return a GGUF string: u64 length, then the bytes."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
