"""How fast this machine reads memory: measured once by a stand-alone read kernel, kept for later runs."""

from __future__ import annotations

import ctypes as ct
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
_SECONDS = 1.0  # for every thread count
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
    """Return this machine's bandwidth: the stored one, unless there is none or it is to be measured `again`.

    A figure is stored for this processor and this many cores. PiError where memory is too short to measure.
    """
    path, identity = _profile_path(), _identity(machine)
    stored = None if again else _load(path, identity)
    if stored is not None:
        return stored
    found = measure(machine, _probe)
    with suppress(
        OSError, PiError
    ):  # a home that cannot be written costs a measurement, not the run
        path.parent.mkdir(parents=True, exist_ok=True)
        _store(path, identity, found)
    return found


def measure(machine: Machine, probe: Callable[[int, int], float]) -> Bandwidth:
    """Sweep the thread counts; probe(threads, bytes) returns bytes a second."""
    wanted = max(_LEAST_BYTES, _CACHES * last_level_cache_bytes())
    n_bytes = min(wanted, _MOST_BYTES, machine.available_bytes // 2)
    rates = {threads: probe(threads, n_bytes) for threads in sweep(machine.n_cores)}
    return Bandwidth(rates, time.strftime("%Y-%m-%d", time.gmtime()))


def sweep(n_cores: int) -> list[int]:
    """Return the thread counts to try: powers of two, and near all cores, where the best one often lies."""
    powers = [2**i for i in range(n_cores.bit_length())]
    return sorted({n for n in (*powers, n_cores * 3 // 4, n_cores - 1, n_cores) if n > 0})


def _probe(threads: int, n_bytes: int) -> float:
    rate = ct.c_uint64()
    native_lib.load().pi_probe_read(threads, n_bytes, _SECONDS, ct.byref(rate))
    return float(rate.value)


def _profile_path() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "powerinfer-toolkit" / "bandwidth.json"


def _identity(machine: Machine) -> dict[str, str | int]:
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


def _store(path: Path, identity: dict[str, str | int], found: Bandwidth) -> None:
    profile = {"identity": identity, "rates": found.rates, "measured_on": found.measured_on}
    with new_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(profile, indent=1))
