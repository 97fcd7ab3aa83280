"""Threads on named processors: --cpu-mask, --cpu-range, and what they refuse (about 2 s)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parity.small_plan import MACHINE, SHAPE
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.runtime import Model, options, plan_report
from powerinfer_toolkit.runtime.bench import main as pi_bench
from powerinfer_toolkit.runtime.plan.machine import probe
from powerinfer_toolkit.runtime.plan.plan import Plan
from powerinfer_toolkit.runtime.plan.planner import PlanOptions, plan_cpu

ALLOWED = sorted(os.sched_getaffinity(0))


def affinities() -> dict[int, set[int]]:
    """The processors of every thread of this process."""
    return {
        int(task.name): os.sched_getaffinity(int(task.name))
        for task in Path("/proc/self/task").iterdir()
    }


def test_only_the_engines_threads_are_placed(synthetic_gguf):
    before = affinities()
    with Model.load(synthetic_gguf("relu"), threads=1, cpus=(ALLOWED[-1],)) as model:
        started = {task: cpus for task, cpus in affinities().items() if task not in before}
        assert started
        assert all(cpus == {ALLOWED[-1]} for cpus in started.values())
        assert os.sched_getaffinity(0) == set(ALLOWED)
        assert Plan.from_json(model.plan.to_json()) == model.plan
        model.logits([5, 6, 7])


def test_threads_default_to_the_cores_named(synthetic_gguf):
    with Model.load(synthetic_gguf("relu"), cpus=(ALLOWED[0],)) as model:
        assert model.plan.n_threads == 1


@pytest.mark.parametrize(
    "flags", [["-C", f"{1 << ALLOWED[0]:x}"], ["-Cr", f"{ALLOWED[0]}-{ALLOWED[0]}"]]
)
def test_flags(synthetic_gguf, capsys, flags):
    command = ["-m", str(synthetic_gguf("relu")), "-p", "8", "-n", "0", "-r", "1", *flags]
    assert pi_bench(command) == 0
    assert pi_bench([*command, "-t", "2"]) == 2
    assert "2 threads do not fit on the 1 processors named" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["-C", "0"], ["-C", "0xg"], ["-Cr", "3-1"], ["-Cr", "1"], ["-C", "1", "-Cr", "0-0"]]
)
def test_flags_that_say_nothing(capsys, flags):
    with pytest.raises(SystemExit) as end:
        pi_bench(["-m", "x.gguf", *flags])
    assert end.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_masks_and_ranges():
    assert options._mask_cpus("0x8000000000000000f") == (0, 1, 2, 3, 67)
    assert options._range_cpus("2-4") == (2, 3, 4)


def test_a_processor_of_others_is_refused():
    with pytest.raises(UsageError, match=f"may not use processor {max(ALLOWED) + 1}") as refusal:
        probe(cpus=(ALLOWED[0], max(ALLOWED) + 1))
    assert refusal.value.hint


def test_more_threads_than_cores_are_said():
    enough, more = (plan_cpu(SHAPE, PlanOptions(threads=n), MACHINE) for n in (4, 5))
    assert plan_report.warnings(SHAPE, enough, MACHINE) == []
    (text,) = plan_report.warnings(SHAPE, more, MACHINE)
    assert "5 threads share the 4 cores" in text
