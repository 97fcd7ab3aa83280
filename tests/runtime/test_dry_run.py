"""pi-run --dry-run with a GPU: on a machine that a file describes, and a small model (about 2 s)."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest

from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime import plan_report
from powerinfer_toolkit.runtime.cli import main
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.device import Device
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.need import gpu_need
from powerinfer_toolkit.runtime.plan.plan import Plan, Side, layer_places
from powerinfer_toolkit.runtime.plan.profile import MachineProfile
from powerinfer_toolkit.runtime.synth.shapes import SHAPES, SynthShape
from powerinfer_toolkit.runtime.synth.write import SynthSettings, write_synth
from refusals import assert_refused, run_command

MIB = 2**20
DEVICE = Device("a described GPU", 89, 100, 2**34, 2**33, 300 * MIB)
MACHINE = Machine(4, 8, 2**34, DEVICE, MachineProfile(9e11, 5e10, 4e10, 2e10))


@pytest.fixture
def pi_run(capsys):
    return partial(run_command, main, capsys)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Four layers of 1 MiB a matrix with statistics and predictors."""
    SHAPES["mini"] = SynthShape("mini", 4, 512, 1024, 8, 4, 256, 2048)
    path = tmp_path_factory.mktemp("dry") / "mini.gguf"
    write_synth(SynthSettings("mini", path, TensorType.F16))
    del SHAPES["mini"]
    return path


@pytest.fixture
def machine(tmp_path) -> Path:
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE.to_record()))
    return tmp_path / "machine.json"


def budget_of(model: Path, share: float) -> int:
    """The device's bytes of a plan between the least and everything."""
    with ModelFile(model) as file:
        from powerinfer_toolkit.runtime.plan.gpu import plan_run
        from powerinfer_toolkit.runtime.plan.planner import PlanOptions

        asked = PlanOptions(ffn="predicted", context=256, vram_budget_bytes=2**33, split=True)
        plan = plan_run(file.shape, asked, MACHINE)
        most = gpu_need(file.shape, plan, plan.units, DEVICE)
    return round(most.total_bytes - (1 - share) * most.weight_bytes)


def dry(pi_run, model, machine, share: float, *flags: object):
    mebibytes = budget_of(model, share) / MIB
    budget = ["--vram-budget", f"{mebibytes}MiB", "--machine", machine, "-c", 256]
    return pi_run("-m", model, "--dry-run", "--ffn", "predicted", *budget, *flags)


def test_the_table_has_all_that_is_placed(pi_run, model, machine):
    said = dry(pi_run, model, machine, 0.6)
    assert said.code == 0, said.err
    topics = {line.split()[0]: line for line in said.out.splitlines() if line.split()}
    for part in ("context", "weights", "KV cache", "activations and scratch", "headroom"):
        assert part in topics["GPU"]
    assert "a described GPU" in topics["GPU"]
    assert "measured GB/s: GPU 900, CPU 50, pulled 20" in topics["expected"]
    assert ": split; head: GPU" in topics["placement"]
    assert "the CPU computes its neurons of split layers in steps of any size" in topics["prompts"]
    head = next(line for line in said.out.splitlines() if line.split()[0] == "layers")
    rows = said.out.splitlines()[said.out.splitlines().index(head) + 1 :]
    assert all(len(row) == len(head) for row in rows)
    assert " ".join(head.split()) == " ".join(plan_report._TITLES)
    assert {row.split()[-1] for row in rows} <= {"GPU", "CPU", "-"}


def test_json_is_the_plan_and_what_is_expected(pi_run, model, machine):
    said = dry(pi_run, model, machine, 0.6, "--json")
    plan, expected = Plan.from_json(said.out), json.loads(said.out)["expected"]
    assert expected["gpu_bytes"] <= plan.vram_budget_bytes
    assert Machine.from_json(json.dumps(expected["machine"])) == MACHINE
    places = layer_places(plan.units, 4)
    for row, place in zip(expected["layers"], places, strict=True):
        assert (row["n_hot"], row["n_pulled"]) == (place.n_hot, place.n_pull - place.n_hot)
        assert row["n_hot"] + row["n_pulled"] + row["n_cold"] == 1024
        shares = [row[f"{part}_share"] for part in ("hot", "pulled", "cold")]
        assert sum(shares) == pytest.approx(1)
        # hottest first: more of the activations than of the neurons
        assert shares[0] >= row["n_hot"] / 1024
        waits = "CPU" if row["gpu_seconds"] > row["cpu_seconds"] else "GPU"
        assert row["waits"] == (waits if row["side"] == "split" else None)
    assert "split" in {row["side"] for row in expected["layers"]}
    weights = sum(row["gpu_weight_bytes"] for row in expected["layers"])
    assert 0 < expected["gpu"]["weight_bytes"] - weights < 2 * 256 * 512 * 2 * 2  # the head


def test_a_split_can_be_turned_off(pi_run, model, machine):
    flags = ["--disable-gpu-index", "--json"]
    plan = Plan.from_json(dry(pi_run, model, machine, 0.6, *flags).out)
    sides = [place.side for place in layer_places(plan.units, 4)]
    assert set(sides) == {Side.CPU, Side.GPU}
    assert sides == sorted(sides)


def test_hand_over_by_flag(pi_run, model, machine):
    said = dry(pi_run, model, machine, 0.6, "--json", "--handover", "wait-value")
    assert json.loads(said.out)["handover"] == "wait_value"


def test_rates_that_nobody_measured_are_said(pi_run, model, tmp_path):
    unknown = dataclasses.replace(MACHINE, profile=None)
    (tmp_path / "unknown.json").write_text(json.dumps(unknown.to_record()))
    said = dry(pi_run, model, tmp_path / "unknown.json", 0.6)
    assert "assumed GB/s" in said.out
    assert "pulled: not known" in said.out


def test_a_whole_model_waits_for_nobody(pi_run, model, machine):
    said = dry(pi_run, model, machine, 2.0)
    row = said.out.splitlines()[-1].split()
    assert (row[0], row[1], row[-1]) == ("0-3", "GPU", "-")


def test_described_machines_are_for_dry_runs(pi_run, model, machine, tmp_path):
    flags = ["-m", model, "--machine", machine]
    assert_refused(pi_run(*flags, "-p", "x"), 2, "--machine describes what to plan for")
    (tmp_path / "cpu.json").write_text('{"n_cores": 4, "n_cpus": 8, "available_bytes": 9000000000}')
    said = pi_run("-m", model, "--dry-run", "--machine", tmp_path / "cpu.json")
    assert "4, " in said.out
    assert "8.382 GiB available" in said.out
    budget = ["--machine", tmp_path / "cpu.json", "--vram-budget", 1]
    assert_refused(pi_run("-m", model, "--dry-run", *budget), 2, "describes no GPU")
    (tmp_path / "bad.json").write_text('{"n_cores": 4}')
    said = pi_run("-m", model, "--dry-run", "--machine", tmp_path / "bad.json")
    assert_refused(said, 1, "not a machine")
    said = pi_run("-m", model, "--dry-run", "--machine", tmp_path / "none.json")
    assert_refused(said, 1, "No such file")


def test_too_small_a_budget_names_the_least(pi_run, model, machine):
    said = pi_run(
        *["-m", model, "--dry-run", "--machine", machine, "-c", 256, "--vram-budget", "310MiB"]
    )
    assert_refused(said, 3, "takes at least")
    least = said.err.split("--vram-budget ")[1].split()[0]
    said = pi_run(
        *["-m", model, "--dry-run", "--machine", machine, "-c", 256, "--vram-budget", least]
    )
    assert said.code == 0
