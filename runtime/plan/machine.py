"""The machine as this process may use it: cores and memory within affinity and cgroup limits, and its GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.runtime.plan.device import Device
from powerinfer_toolkit.runtime.plan.profile import MachineProfile

_CGROUP = Path("sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """Cores and memory that this process may use."""

    n_cores: int  # physical cores, at most the cgroup's CPU quota
    n_cpus: int  # logical processors in the affinity mask
    available_bytes: int  # memory that can be taken without swapping
    device: Device | None = None  # its GPU, where one was looked for
    profile: MachineProfile | None = None  # how fast it reads weights, where that is known

    def to_record(self) -> dict[str, Any]:
        """Return what from_json reads, as a dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return a machine that a file describes; PiError for what describes none."""
        try:
            record = json.loads(text)
            device, profile = record.pop("device", None), record.pop("profile", None)
            machine = cls(
                **record,
                device=Device(**device) if device else None,
                profile=MachineProfile(**profile) if profile else None,
            )
            _check_described(machine)
        except (ValueError, TypeError, AttributeError, RecursionError) as failure:
            raise PiError(
                f"not a machine: {failure}",
                hint="pi-run --dry-run --json prints one under expected.machine; see docs/plan.md",
            ) from failure
        return machine


_MOST = 2**62  # of any count, size or rate
_MAY_BE_ZERO = ("pull_bytes_per_second", "handover_seconds")


def _check_described(machine: Machine) -> None:
    """ValueError for numbers that no machine has."""
    counts = _numbers(machine, "n_cores", "n_cpus", "available_bytes")
    if machine.device is not None:
        names = ("n_processors", "total_bytes", "free_bytes", "context_bytes", "capability")
        counts |= _numbers(machine.device, *names)
    for name, value in counts.items():
        if type(value) is not int or not 0 < value < _MOST:
            raise ValueError(f"{name} is {value!r}, not a positive whole number")
    for name, value in vars(machine.profile).items() if machine.profile else ():
        if value is None and name == "handover_seconds":
            continue
        least = 0.0 if name in _MAY_BE_ZERO else 1.0
        if type(value) not in (int, float) or not least <= value < _MOST:
            raise ValueError(f"{name} is {value!r}, not a number from {least:g} on")


def _numbers(record: object, *names: str) -> dict[str, object]:
    return {name: getattr(record, name) for name in names}


def probe(root: Path = Path("/"), *, cpus: Sequence[int] | None = None) -> Machine:
    """Look at the machine, or at those logical processors of it; `root` stands in for / in tests.

    Raises UsageError for a processor that this process may not use.
    """
    allowed = _affinity(root)
    cpus = allowed if cpus is None else cpus
    if refused := sorted(set(cpus) - set(allowed)):
        raise UsageError(
            f"this process may not use processor {refused[0]}",
            hint=f"it may use {', '.join(map(str, allowed))}",
        )
    cores = len({_core_of(root, cpu) for cpu in cpus})
    groups = _own_groups(root)
    quota = min((q for group in groups if (q := _cpu_quota(group)) is not None), default=None)
    if quota is not None:
        cores = max(1, min(cores, int(quota)))
    limits = [left for group in groups if (left := _memory_left(group)) is not None]
    return Machine(cores, len(cpus), min([_memory_available(root), *limits]))


@contextmanager
def threads_on(cpus: Sequence[int] | None) -> Iterator[None]:
    """Let threads that start inside run on these logical processors only; None changes nothing.

    Raises UsageError where the system cannot do that.
    """
    if cpus is None:
        yield
        return
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("this system does not place threads", hint="leave --cpu-mask out")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as failure:
        raise UsageError(
            f"threads cannot be placed on processors {cpus}: {failure}",
            hint="leave --cpu-mask out, or name processors that this process may use",
        ) from failure
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def last_level_cache_bytes(root: Path = Path("/")) -> int:
    """Return the size of the processor's largest cache, 0 where it is not known."""
    caches = (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((_size(_read(path)) for path in caches), default=0)


def processor_name(root: Path = Path("/")) -> str:
    """Return what the processor calls itself, "" where it is not known."""
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model"):
            return value.strip()
    return ""


def _size(text: str) -> int:
    """Return bytes of the kernel's 32K, 32768K or 8M."""
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    digits = text.rstrip("KMG")
    return int(digits) * scale if digits.isdigit() else 0


def _affinity(root: Path) -> list[int]:
    if root == Path("/") and hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _core_of(root: Path, cpu: int) -> tuple[str, str]:
    """Return (package, core); a processor without a topology counts as a core of its own."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    package = _read(topology / "physical_package_id")
    core = _read(topology / "core_id")
    return (package, core) if package and core else ("", f"cpu{cpu}")


def _own_groups(root: Path) -> list[Path]:
    """Return the cgroup directories, v1 and v2, that limit this process: its own and all above it."""
    groups = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        mounts = [root / _CGROUP / name for name in controllers.split(",") if name]
        if not controllers:
            mounts = [root / _CGROUP, root / _CGROUP / "unified"]
        for mount in mounts:
            group = mount / path.strip("/")
            # inside a container the path may be the host's: the mount point itself is then the group
            while not group.is_dir() and group != mount:
                group = group.parent
            while group != mount:
                groups.append(group)
                group = group.parent
            groups.append(mount)
    return groups


def _cpu_quota(group: Path) -> float | None:
    """Return the processors' worth of time that a cgroup may use, None for no limit."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not period:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        return int(quota) / int(period)
    return None


def _memory_left(group: Path) -> int | None:
    """Return limit less use of a cgroup in bytes; file pages, which the kernel can drop, count as free."""
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, usage = _read(group / limit_name), _read(group / usage_name)
        if limit.isdigit() and usage.isdigit():
            lines = _read(group / "memory.stat").splitlines()
            statistics = dict(line.split(" ", 1) for line in lines if " " in line)
            caches = (prefix + "inactive_file", prefix + "active_file")
            droppable = sum(int(statistics.get(name, "0")) for name in caches)
            return max(0, int(limit) - int(usage) + droppable)
    return None


def _memory_available(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
