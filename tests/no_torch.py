"""Pytest plugin (-p no_torch): the run has no torch, so that tests which need it skip.

For sanitized runs: torch under AddressSanitizer is slow and reports what is not ours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

REFUSED = {"torch", "transformers"}


class Refuse:
    """Finder that knows better than all others: the refused modules do not exist."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.split(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"{name} is left out of this run", name=name)
        return None


sys.meta_path.insert(0, Refuse())
