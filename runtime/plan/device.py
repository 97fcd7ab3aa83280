"""The GPU as this process may use it."""

from __future__ import annotations

import ctypes as ct
from dataclasses import dataclass

from powerinfer_toolkit.runtime import native_lib


@dataclass(frozen=True)
class Device:
    """A GPU and its memory in bytes."""

    name: str
    capability: int  # 10 * major + minor
    n_processors: int
    total_bytes: int
    free_bytes: int  # beside the context
    context_bytes: int  # what using the GPU takes, or a reserve for it


def probe_device() -> Device:
    """Open the first GPU and look at it; PiError saying what is missing where there is none."""
    native = native_lib.GpuDevice()
    native_lib.load().pi_gpu_probe(0, ct.byref(native))
    return Device(
        name=native.name.decode("utf-8", "replace"),
        capability=native.capability,
        n_processors=native.n_processors,
        total_bytes=native.total_bytes,
        free_bytes=native.free_bytes,
        context_bytes=native.context_bytes,
    )
