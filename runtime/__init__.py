"""Run a PowerInfer-GGUF: plan, load, generate."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Model"]

if TYPE_CHECKING:
    from powerinfer_toolkit.runtime.model import Model
else:

    def __getattr__(name: str) -> object:
        """Import the model on first use: `pi-run --help` must not wait for numpy."""
        if name == "Model":
            from powerinfer_toolkit.runtime.model import Model

            return Model
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
