"""Cores and memory within cgroup limits, on made-up machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from powerinfer_toolkit.runtime.plan import machine

GIB = 2**30
MEMINFO = "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n"  # 16 GiB available


def write(root: Path, **files: str) -> Path:
    for path, text in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root


@pytest.fixture
def computer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages of two cores with two threads each: eight processors."""
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 8)
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": ""}
    for cpu in range(8):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{topology}/physical_package_id"] = f"{cpu // 4}\n"
        files[f"{topology}/core_id"] = f"{cpu % 2}\n"
    return write(tmp_path, **files)


def test_cores_are_counted_once(computer):
    assert machine.probe(computer) == machine.Machine(4, 8, 16 * GIB)


def test_processors_without_topology_are_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 3)
    assert machine.probe(write(tmp_path, **{"proc/meminfo": MEMINFO})).n_cores == 3


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_quota_of_cgroup_v2(computer, quota, cores):
    group = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": f"{quota}\n"}
    assert machine.probe(write(computer, **group)).n_cores == cores


def test_memory_of_cgroup_v2_counts_droppable_pages_as_free(computer):
    group = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 5\nactive_file {GIB // 2}\ninactive_file {2 * GIB}\n",
    }
    assert machine.probe(write(computer, **group)).available_bytes == 3.5 * GIB


def test_limits_of_cgroup_v1(computer):
    group = {
        "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB // 4}\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "100000\n",
        "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
    }
    found = machine.probe(write(computer, **group))
    assert (found.n_cores, found.available_bytes) == (1, GIB - GIB // 4)


def test_no_quota_of_cgroup_v1(computer):
    group = {
        "proc/self/cgroup": "2:cpu,cpuacct:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert machine.probe(write(computer, **group)).n_cores == 4


def test_a_containers_own_mount_stands_in_for_the_hosts_path(computer):
    group = {"proc/self/cgroup": "0::/host/path\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}
    assert machine.probe(write(computer, **group)).n_cores == 1


def test_this_machine_has_something():
    found = machine.probe()
    assert 1 <= found.n_cores <= found.n_cpus
    assert found.available_bytes > 2**20
