"""Ownership of one native object."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable
from typing import Self

from powerinfer_toolkit.errors import PiError


class NativeHandle:
    """A native object that is freed once; a context manager that survives being closed twice."""

    _pointer: ct.c_void_p | None = None

    def __init__(self, free: Callable[[ct.c_void_p], None], name: str) -> None:
        """Start with a null pointer for a creating function to fill; `name` is for error messages."""
        self._pointer = ct.c_void_p()
        self._free = free
        self._name = name

    def __enter__(self) -> Self:
        """Return the owner."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the object."""
        self.close()

    @property
    def handle(self) -> ct.c_void_p:
        """The native pointer; PiError after close."""
        if self._pointer is None:
            raise PiError(f"the {self._name} is closed", hint="use it inside its with block")
        return self._pointer

    def close(self) -> None:
        """Free the object; more calls do nothing."""
        pointer, self._pointer = self._pointer, None
        if pointer:
            self._free(pointer)
