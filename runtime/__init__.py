"""Run a PowerInfer-GGUF: plan, load, generate."""

from powerinfer_toolkit.runtime.model import Model

__all__ = ["Model"]
