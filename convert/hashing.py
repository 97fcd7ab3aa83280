"""Hashes of tensors that do not depend on how they are stored."""

from __future__ import annotations

import hashlib

from powerinfer_toolkit.convert.elements import Entry, RawTensor


class TensorHash:
    """The hash of a set of tensors, each added when it is read.

    It is the SHA-256 of one line "name type shape hash" per tensor, sorted by name: type as the source names
    it, shape as numbers joined by "x", hash of the row-major little-endian bytes.
    """

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}

    def add(self, name: str, entry: Entry, raw: RawTensor) -> None:
        """Take a tensor in, once."""
        if name not in self._lines:
            shape = "x".join(map(str, entry.shape))
            digest = hashlib.sha256(raw.data.data).hexdigest()
            self._lines[name] = f"{name} {entry.dtype} {shape} {digest}\n"

    def hexdigest(self) -> str:
        """Return the hash of all tensors taken in so far."""
        lines = (line for _, line in sorted(self._lines.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()
