"""How fast this machine reads memory: the best that a stand-alone read kernel ever did, kept between runs."""

from __future__ import annotations

import ctypes as ct
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerinfer_toolkit import __version__
from powerinfer_toolkit.artifact import new_file
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.plan.machine import (
    Machine,
    last_level_cache_bytes,
    processor_name,
)

SCHEMA = 1
_SWEEP_SECONDS, _CHECK_SECONDS = 1.0, 0.3  # for a thread count
_LEAST_BYTES, _MOST_BYTES = 256 * 2**20, 4 * 2**30  # read in one pass
_CACHES = 8  # last-level caches that the memory read is large


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second read from memory, by thread count, and the day (UTC) of the measurement."""

    rates: dict[int, float]
    measured_on: str

    @property
    def best_threads(self) -> int:
        """The thread count that read fastest."""
        return max(self.rates, key=lambda threads: self.rates[threads])

    @property
    def bytes_per_second(self) -> float:
        """The best rate of the sweep."""
        return self.rates[self.best_threads]


def read_bandwidth(machine: Machine, *, again: bool = False) -> Bandwidth:
    """Return this machine's bandwidth: what is stored, or more where memory is read faster now.

    A machine is a processor and a number of cores. The first time, and `again`, all thread counts are swept. PiError
    where memory is too short to measure.
    """
    path, identity = cache_folder() / "bandwidth.json", machine_identity(machine)
    stored = None if again else _load(path, identity)
    found = measure(machine) if stored is None else _raised(stored, machine)
    if found != stored:
        keep(path, {"identity": identity, "rates": found.rates, "measured_on": found.measured_on})
    return found


def measure(machine: Machine) -> Bandwidth:
    """Sweep the thread counts."""
    n_bytes = pass_bytes(machine)
    rates = {n: probe_rate(n, n_bytes, _SWEEP_SECONDS) for n in sweep(machine.n_cores)}
    return Bandwidth(rates, _today())


def _raised(stored: Bandwidth, machine: Machine) -> Bandwidth:
    """Return the stored rates, the best one replaced if it was taken at a busier time than now."""
    threads = stored.best_threads
    rate = probe_rate(threads, pass_bytes(machine), _CHECK_SECONDS)
    if rate <= stored.bytes_per_second:
        return stored
    return Bandwidth({**stored.rates, threads: rate}, _today())


def pass_bytes(machine: Machine) -> int:
    """Return the size of what is read in one pass: larger than the caches, within the memory."""
    wanted = max(_LEAST_BYTES, _CACHES * last_level_cache_bytes())
    return min(wanted, _MOST_BYTES, machine.available_bytes // 2)


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())


def sweep(n_cores: int) -> list[int]:
    """Return the thread counts to try: powers of two, and near all cores, where the best one often lies."""
    powers = [2**i for i in range(n_cores.bit_length())]
    return sorted({n for n in (*powers, n_cores * 3 // 4, n_cores - 1, n_cores) if n > 0})


def probe_rate(threads: int, n_bytes: int, seconds: float) -> float:
    """Return the bytes a second that so many threads read; PiError where memory is too short."""
    rate = ct.c_uint64()
    native_lib.load().pi_probe_read(threads, n_bytes, seconds, ct.byref(rate))
    return float(rate.value)


def cache_folder() -> Path:
    """Return where measurements are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "powerinfer-toolkit"


def keep(path: Path, record: dict[str, Any]) -> None:
    """Write a measurement to its file; a home that cannot be written is no reason to stop."""
    with suppress(OSError, PiError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path, force=True) as temporary:
            temporary.write_text(json.dumps(record, indent=1))


def machine_identity(machine: Machine) -> dict[str, str | int]:
    """Return what measurements belong to."""
    return {
        "schema": SCHEMA,
        "made_by": __version__,
        "processor": processor_name(),
        "n_cores": machine.n_cores,
    }


def _load(path: Path, identity: dict[str, str | int]) -> Bandwidth | None:
    """Return what is stored for this machine; None for another one's and for what is no profile."""
    try:
        profile = json.loads(path.read_bytes())
        rates = {int(threads): float(rate) for threads, rate in profile["rates"].items()}
        if profile["identity"] != identity or min(rates.values()) <= 0:
            return None
        return Bandwidth(rates, str(profile["measured_on"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
