"""The machine's profile: what is measured beside what, and what is kept; nothing is really measured (about 1 s)."""

from __future__ import annotations

import json
import threading
import time

import pytest

from powerinfer_toolkit.errors import DoesNotFit
from powerinfer_toolkit.runtime.plan import rates
from powerinfer_toolkit.runtime.plan.device import Device
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.profile import UNMEASURED

MACHINE = Machine(n_cores=4, n_cpus=8, available_bytes=8 << 30)
DEVICE = Device("GPU", 90, 132, 1 << 37, 1 << 36, 1 << 29)


class Clock:
    """Stands in for the probes: each takes its time, and is slower while another one runs."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.lock = threading.Lock()
        self.calls: list[str] = []

    def run(self, name: str, rate: float, seconds: float) -> float:
        with self.lock:
            self.running.add(name)
            self.calls.append(name)
            contended = len(self.running) > 1
        time.sleep(seconds)
        with self.lock:
            self.running.remove(name)
        return rate * (0.8 if contended else 1.0)


@pytest.fixture
def clock(monkeypatch, tmp_path):
    found = Clock()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, seconds in (("_SECONDS", 0.02), ("_START_SECONDS", 0.05)):
        monkeypatch.setattr(rates, name, seconds)
    monkeypatch.setattr(rates, "_FIRST_TOUCH_BYTES_PER_SECOND", 1e12)
    monkeypatch.setattr(
        rates, "probe_rate", lambda n, _, seconds: found.run("cpu", 10.0 * n, seconds)
    )
    monkeypatch.setattr(
        rates,
        "_gpu_rate",
        lambda source, seconds: found.run(
            "pull" if source else "gpu", 16.0 if source else 1000.0, seconds
        ),
    )
    return found


def test_what_is_measured_beside_what(clock):
    found = rates.measure(MACHINE)
    assert found.gpu_bytes_per_second == 1000
    assert found.cpu_bytes_per_second == 40  # all cores; one is the waiting thread's beside the GPU
    assert found.cpu_beside_bytes_per_second == pytest.approx(0.8 * 30)
    assert found.pull_bytes_per_second == pytest.approx(0.8 * 16)
    assert found.handover_seconds is None


def test_it_is_measured_once(clock, tmp_path, capsys):
    first = rates.machine_profile(MACHINE, DEVICE)
    n_calls = len(clock.calls)
    assert n_calls > 0
    assert rates.machine_profile(MACHINE, DEVICE) == first
    assert len(clock.calls) == n_calls
    assert capsys.readouterr().err.count("measuring") == 1
    rates.machine_profile(MACHINE, Device("another", 80, 1, 1, 1, 1))
    assert len(clock.calls) == 2 * n_calls
    rates.machine_profile(MACHINE, DEVICE, again=True)
    assert len(clock.calls) == 3 * n_calls


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"identity": 1, "profile": {"gpu": 2}}'])
def test_what_is_no_profile_is_measured_anew(clock, tmp_path, text):
    path = tmp_path / "powerinfer-toolkit" / "profile.json"
    path.parent.mkdir()
    path.write_text(text)
    found = rates.machine_profile(MACHINE, DEVICE)
    assert json.loads(path.read_text())["profile"]["gpu_bytes_per_second"] == 1000
    assert rates.machine_profile(MACHINE, DEVICE) == found


def test_rates_are_assumed_where_memory_is_short(clock, monkeypatch, tmp_path, capsys):
    def refuse(*_: object) -> float:
        raise DoesNotFit("no memory")

    monkeypatch.setattr(rates, "_gpu_rate", refuse)
    assert rates.machine_profile(MACHINE, DEVICE) == UNMEASURED
    assert "assumed, not measured: no memory" in capsys.readouterr().err
    assert not (tmp_path / "powerinfer-toolkit").exists()
