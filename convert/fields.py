"""Typed, range-checked access to the values that describe a model: config.json or a file's keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from powerinfer_toolkit.errors import PiError


class Fields:
    """Values by name, found in the file `path`; None counts as absent. What does not fit is a PiError."""

    def __init__(self, values: Mapping[str, object], path: Path) -> None:
        self._values = values
        self.path = path

    def error(self, what: str) -> PiError:
        """Return the failure of a value that does not fit."""
        return PiError(f"{self.path}: {what}", hint="get the file again, or correct it")

    def has(self, name: str) -> bool:
        """Return whether there is such a value, None included."""
        return name in self._values

    def get(self, name: str) -> object:
        """Return a value as it is."""
        return self._values.get(name)

    def integer(self, name: str, default: int | None = None, *, most: int = 1 << 24) -> int:
        """Return an integer from 1 to `most`."""
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.error(f"{name} is {value!r:.80}, not an integer from 1 to {most}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self._present(name, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        raise self.error(f"{name} is {value!r:.80}, not a positive number")

    def flag(self, name: str) -> bool:
        """Return true or false, false where it is absent."""
        value = self._present(name, False)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {value!r:.80}, not true or false")
        return value

    def _present(self, name: str, default: object) -> object:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise PiError(f"{self.path} lacks {name}", hint="get the file again, or correct it")
        return value
