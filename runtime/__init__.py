"""Run a PowerInfer-GGUF: plan, load, generate."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from powerinfer_toolkit.runtime.model import Model

__all__ = ["Model"]


def __getattr__(name: str) -> object:
    """Import the model on first use: `pi-run --help` must not wait for numpy."""
    if name == "Model":
        from powerinfer_toolkit.runtime.model import Model

        return Model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
