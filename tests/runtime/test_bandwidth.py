"""The read probe and what is kept of it (about 1 s)."""

from __future__ import annotations

import ctypes as ct
import json

import pytest

from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.runtime.plan import bandwidth
from powerinfer_toolkit.runtime.plan.bandwidth import measure, read_bandwidth, sweep
from powerinfer_toolkit.runtime.plan.machine import (
    Machine,
    last_level_cache_bytes,
    processor_name,
)

MACHINE = Machine(n_cores=4, n_cpus=8, available_bytes=8 << 30)


def probe(libpi, threads: int, n_bytes: int, seconds: float = 0.0) -> int:
    rate = ct.c_uint64()
    libpi.pi_probe_read(threads, n_bytes, seconds, ct.byref(rate))
    return rate.value


def test_rates_are_plausible(libpi):
    in_cache = max(probe(libpi, 1, 1 << 20, 0.05) for _ in range(3))
    in_memory = probe(libpi, 2, 256 << 20)
    # a cache feeds one core with several GB/s, less a sanitizer's tax; no host of today reads 10 TB/s
    assert 1e8 < in_memory < 1e13
    assert 1e8 < in_cache < 1e13


@pytest.mark.parametrize(
    ("threads", "n_bytes", "seconds", "says"),
    [
        (0, 1 << 20, 0.0, "n_threads"),
        (1025, 1 << 20, 0.0, "n_threads"),
        (1, 1000, 0.0, "n_bytes"),
        (1, 1 << 41, 0.0, "n_bytes"),
        (1, 1 << 20, -1.0, "min_seconds"),
        (1, 1 << 20, float("nan"), "min_seconds"),
    ],
)
def test_arguments_out_of_range(libpi, threads, n_bytes, seconds, says):
    with pytest.raises(UsageError, match=says):
        probe(libpi, threads, n_bytes, seconds)


@pytest.mark.parametrize(
    ("n_cores", "counts"),
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 5, 6]), (16, [1, 2, 4, 8, 12, 15, 16])],
)
def test_sweep(n_cores, counts):
    assert sweep(n_cores) == counts


def test_best_of_the_sweep_counts(monkeypatch):
    rates = {1: 10.0, 2: 18.0, 3: 25.0, 4: 24.0}
    monkeypatch.setattr(bandwidth, "probe_rate", lambda threads, *_: rates[threads])
    found = measure(MACHINE)
    assert (found.best_threads, found.bytes_per_second) == (3, 25.0)


def test_a_short_machine_reads_less(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        bandwidth, "probe_rate", lambda _, n_bytes, __: sizes.append(n_bytes) or 1.0
    )
    measure(Machine(1, 1, 100 << 20))
    assert sizes == [50 << 20]


@pytest.fixture
def rates(monkeypatch, tmp_path):
    """Rates that the next measurements give; the cache is empty."""
    given = [1.0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(bandwidth, "probe_rate", lambda *_: given[-1])
    return given


def stored(tmp_path):
    (path,) = (tmp_path / "powerinfer-toolkit").iterdir()
    return json.loads(path.read_text())


def test_the_best_of_all_runs_is_kept(rates, tmp_path):
    assert read_bandwidth(MACHINE).rates == dict.fromkeys((1, 2, 3, 4), 1.0)
    for rate, best in ((0.5, 1.0), (2.0, 2.0), (1.5, 2.0)):
        rates.append(rate)
        assert read_bandwidth(MACHINE).bytes_per_second == best
    assert stored(tmp_path)["rates"]["1"] == 2.0
    assert stored(tmp_path)["rates"]["2"] == 1.0


def test_measured_again_when_asked_and_on_another_machine(rates, tmp_path):
    read_bandwidth(MACHINE)
    rates.append(0.5)
    assert read_bandwidth(MACHINE, again=True).bytes_per_second == 0.5
    rates.append(0.25)
    assert read_bandwidth(Machine(3, 8, 8 << 30)).bytes_per_second == 0.25
    assert stored(tmp_path)["identity"]["n_cores"] == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"identity": {}, "rates": {"1": "x"}}'])
def test_a_damaged_profile_is_measured_again(rates, tmp_path, text):
    read_bandwidth(MACHINE)
    (path,) = (tmp_path / "powerinfer-toolkit").iterdir()
    path.write_text(text)
    rates.append(0.5)
    assert read_bandwidth(MACHINE).bytes_per_second == 0.5


def test_a_home_that_cannot_be_written(rates, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert read_bandwidth(MACHINE).bytes_per_second == 1.0


def test_what_the_system_says_of_caches_and_processor(tmp_path):
    for index, size in enumerate(("32K", "1024K", "16M", "odd")):
        path = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{index}/size"
        path.parent.mkdir(parents=True)
        path.write_text(size + "\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: A Chip 1\n")
    assert last_level_cache_bytes(tmp_path) == 16 << 20
    assert processor_name(tmp_path) == "A Chip 1"
    assert last_level_cache_bytes(tmp_path / "none") == 0
    assert processor_name(tmp_path / "none") == ""
