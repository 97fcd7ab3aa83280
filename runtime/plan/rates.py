"""How fast this machine and its GPU read weights: measured once, kept between runs."""

from __future__ import annotations

import ctypes as ct
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.plan.bandwidth import (
    cache_folder,
    keep,
    machine_identity,
    pass_bytes,
    probe_rate,
)
from powerinfer_toolkit.runtime.plan.device import Device
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.profile import UNMEASURED, MachineProfile

_GPU_BYTES = 256 * 2**20  # read in one pass, more than any GPU's cache
_SECONDS = 0.3  # of a measurement
_START_SECONDS = 0.3
_FIRST_TOUCH_BYTES_PER_SECOND = 2e9  # at which new memory is had, at least
_FROM_DEVICE, _FROM_HOST = 0, 1


def machine_profile(machine: Machine, device: Device, *, again: bool = False) -> MachineProfile:
    """Return what is stored of this processor and GPU; measured the first time, and `again`.

    UNMEASURED, with a warning, where memory is too short to measure.
    """
    path = cache_folder() / "profile.json"
    identity = {**machine_identity(machine), "device": device.name}
    stored = None if again else _load(path, identity)
    if stored is not None:
        return stored
    console.info("measuring how fast this machine and its GPU read memory: once, some seconds")
    try:
        found = measure(machine)
    except PiError as failure:
        console.warning(f"the rates of this machine are assumed, not measured: {failure.message}")
        return UNMEASURED
    keep(path, {"identity": identity, "profile": asdict(found)})
    return found


def measure(machine: Machine) -> MachineProfile:
    """Measure the GPU, the CPU, and both at once; PiError where memory is too short."""
    n_bytes = pass_bytes(machine)
    # A thread that waits for the GPU needs a core too.
    fewer = max(1, machine.n_cores - 1)

    def cpu(seconds: float) -> float:
        return probe_rate(fewer, n_bytes, seconds)

    def pull(seconds: float) -> float:
        return _gpu_rate(_FROM_HOST, seconds)

    alone = max(cpu(_SECONDS), probe_rate(machine.n_cores, n_bytes, _SECONDS))
    start = _START_SECONDS + (n_bytes + _GPU_BYTES) / _FIRST_TOUCH_BYTES_PER_SECOND
    return MachineProfile(
        gpu_bytes_per_second=_gpu_rate(_FROM_DEVICE, _SECONDS),
        cpu_bytes_per_second=alone,
        cpu_beside_bytes_per_second=min(alone, _beside(cpu, pull, start)),
        pull_bytes_per_second=_beside(pull, cpu, start),
    )


def _beside(
    measured: Callable[[float], float], other: Callable[[float], float], start_seconds: float
) -> float:
    """Return what is measured while the other runs; either takes at most start_seconds to get its memory."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(other, start_seconds + 2 * _SECONDS)
        time.sleep(start_seconds)
        found = measured(_SECONDS)
        running.result()
    return found


def _gpu_rate(source: int, seconds: float) -> float:
    rate = ct.c_uint64()
    native_lib.load().pi_gpu_probe_read(0, source, _GPU_BYTES, seconds, ct.byref(rate))
    return float(rate.value)


def _load(path: Path, identity: dict[str, str | int]) -> MachineProfile | None:
    """Return what is stored for this machine; None for another one's and for what is no profile."""
    try:
        record = json.loads(path.read_bytes())
        profile = MachineProfile(**record["profile"])
        if record["identity"] != identity or profile.gpu_bytes_per_second <= 0:
            return None
        return profile
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
