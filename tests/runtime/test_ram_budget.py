"""--ram-budget: kept exactly, refused with the least that would do, and true of a real run."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys

import pytest

from parity import small_plan
from parity.small_plan import MACHINE
from powerinfer_toolkit.errors import DoesNotFit, ExitCode, UsageError
from powerinfer_toolkit.runtime import Model, bench, cli
from powerinfer_toolkit.runtime.plan.plan import Plan
from powerinfer_toolkit.runtime.plan.planner import PlanOptions, memory_need, plan_cpu

MIB = 2**20
SHAPE = dataclasses.replace(small_plan.SHAPE, weight_bytes=100 * MIB, predictor_bytes=10 * MIB)


def needed(options: PlanOptions) -> int:
    return memory_need(SHAPE, plan_cpu(SHAPE, options, MACHINE)).total_bytes


def test_the_budget_is_kept_to_the_byte():
    n_bytes = needed(PlanOptions())
    plan = plan_cpu(SHAPE, PlanOptions(ram_budget_bytes=n_bytes), MACHINE)
    assert plan.ram_budget_bytes == n_bytes
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(DoesNotFit, match="the budget is") as refusal:
        plan_cpu(SHAPE, PlanOptions(ram_budget_bytes=n_bytes - 1), MACHINE)
    assert refusal.value.exit_code == ExitCode.DOES_NOT_FIT
    least = re.search(r"--ram-budget (\d+)MiB is the least", refusal.value.hint)
    assert int(least[1]) == math.ceil(n_bytes / MIB)


def test_only_weights_that_the_mode_reads_count():
    exact, predicted = (needed(PlanOptions(ffn=ffn)) for ffn in ("exact", "predicted"))
    assert predicted - exact == SHAPE.predictor_bytes
    assert exact > SHAPE.weight_bytes - SHAPE.predictor_bytes


@pytest.mark.parametrize("change", [{"context": 64}, {"batch": 1}, {"threads": 1}])
def test_less_is_needed_for_less(change):
    assert needed(PlanOptions(**change)) < needed(PlanOptions())


def test_a_budget_above_the_available_memory():
    """What the run needs must be there; a budget beyond that is no licence."""
    n_bytes = needed(PlanOptions())
    budget = PlanOptions(ram_budget_bytes=10 * n_bytes)
    plan_cpu(SHAPE, budget, dataclasses.replace(MACHINE, available_bytes=n_bytes))
    short = dataclasses.replace(MACHINE, available_bytes=n_bytes - 1)
    with pytest.raises(DoesNotFit, match="the memory available is"):
        plan_cpu(SHAPE, budget, short)
    plan_cpu(SHAPE, PlanOptions(), short)  # without a budget mapped weights may come and go


@pytest.mark.parametrize("n_bytes", [0, -1])
def test_impossible_budgets(n_bytes):
    with pytest.raises(UsageError, match="out of range"):
        plan_cpu(SHAPE, PlanOptions(ram_budget_bytes=n_bytes), MACHINE)


def test_model_load_takes_bytes(synthetic_gguf):
    path = synthetic_gguf("dense")
    with pytest.raises(DoesNotFit):
        Model.load(path, ram_budget_bytes=MIB)
    with Model.load(path, ram_budget_bytes=2**30) as model:
        assert model.logits([1]).shape == (1, 293)


def run(main, *flags: object) -> int:
    try:
        return main([str(flag) for flag in flags])
    except SystemExit as end:  # argparse
        return int(end.code or 0)


@pytest.mark.parametrize(
    ("main", "flags"),
    [(cli.main, ["-p", "w1"]), (cli.main, ["--dry-run"]), (bench.main, ["-p", 8, "-n", 0])],
)
def test_the_least_that_is_named_is_enough(main, flags, synthetic_gguf, capsys):
    flags = ["-m", synthetic_gguf("dense"), *flags, *(["-r", 1] if main is bench.main else [])]
    for budget in ("0.001", "1MiB", "512k"):
        assert run(main, *flags, "--ram-budget", budget) == 3
        said = capsys.readouterr()
        assert said.out == ""
        error, hint = said.err.splitlines()
        assert error.startswith("error: this run needs ")
        least = re.search(r"--ram-budget (\S+) is the least", hint)[1]
    assert run(main, *flags, "--ram-budget", least) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("text", ["much", "", "0", "-1", "nan", "8TB", "1e3"])
def test_what_is_no_budget(text, synthetic_gguf, capsys):
    assert run(cli.main, "-m", synthetic_gguf("dense"), "-p", "w1", f"--ram-budget={text}") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split(":")[0] for line in said.err.splitlines()] == ["error", "hint"]


@pytest.mark.resources
@pytest.mark.resources
def test_a_real_run_stays_below_its_budget(smollm2_gguf):
    """All weights are read, a full batch is computed: the peak must stay below what the plan promised."""
    command = [sys.executable, "-m", "powerinfer_toolkit.runtime.cli", "-m", str(smollm2_gguf)]
    flags = ["-c", "512", "-b", "128", "-t", "2", "-n", "4", "--json"]
    asked = [*command, *flags, "-p", "tell me " * 200]
    refused = subprocess.run([*asked, "--ram-budget", "1MiB"], capture_output=True, check=False)
    least = re.search(rb"--ram-budget (\d+)MiB is the least", refused.stderr)[1].decode()
    done = subprocess.run([*asked, "--ram-budget", least + "MiB"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    peak = json.loads(done.stdout)["peak_rss_bytes"]
    assert 0.6 * int(least) * MIB < peak <= int(least) * MIB
