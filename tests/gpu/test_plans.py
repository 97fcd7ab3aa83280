"""What the planner decides, run: split models under budgets, their memory, and pi-bench's account of them (about 25 s)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from gpu.models import MICRO, Synth, options
from gpu.test_model import FEW_TOKENS, MANY_TOKENS, steps
from parity.closeness import relative_l2
from parity.steps import run_chunks
from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime import bench, cli
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan import gpu, streaming, surroundings
from powerinfer_toolkit.runtime.plan.bandwidth import Bandwidth
from powerinfer_toolkit.runtime.plan.device import probe_device
from powerinfer_toolkit.runtime.plan.gpu import plan_run
from powerinfer_toolkit.runtime.plan.machine import Machine, probe
from powerinfer_toolkit.runtime.plan.need import gpu_need, memory_need
from powerinfer_toolkit.runtime.plan.plan import Side, layer_places
from powerinfer_toolkit.runtime.plan.planner import PlanOptions
from powerinfer_toolkit.runtime.plan.profile import MachineProfile
from powerinfer_toolkit.runtime.synth.shapes import SHAPES
from powerinfer_toolkit.runtime.synth.write import SynthSettings, write_synth

# So slow that even this model is worth a split, and something is pulled.
SLOW = MachineProfile(9e11, 5e8, 4e8, 2e8, handover_seconds=1e-6)


def machine() -> Machine:
    return dataclasses.replace(probe(), device=probe_device(), profile=SLOW)


def budget_of(file: ModelFile, asked: PlanOptions, share: float) -> int:
    """The bytes that leave a share of the weights to the GPU."""
    whole = plan_run(file.shape, dataclasses.replace(asked, vram_budget_bytes=-1), machine())
    need = gpu_need(file.shape, whole, whole.units, probe_device())
    return round(need.total_bytes - (1 - share) * need.weight_bytes)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.85])
@pytest.mark.parametrize(
    ("outtype", "ffn", "dense_twin"),
    [("f16", "predicted", False), ("q4_0", "exact", False), ("q8_0", None, True)],
)
def test_a_split_within_a_budget(
    synth: Synth, outtype: str, ffn: str | None, dense_twin: bool, share: float
) -> None:
    path, asked = synth(outtype, dense_twin), options(ffn)
    file = ModelFile(path)
    asked_here = dataclasses.replace(asked, vram_budget_bytes=budget_of(file, asked, share))
    plan = plan_run(file.shape, asked_here, machine())
    assert Side.SPLIT in {place.side for place in layer_places(plan.units, file.shape.n_layers)}
    assert memory_need(file.shape, plan).pinned_bytes > 0
    with Model.open(path, asked) as cpu, Model(file, plan) as split:
        (prompt, singles), (want_prompt, want_singles) = steps(split), steps(cpu)
        assert relative_l2(prompt, want_prompt) < MANY_TOKENS
        assert relative_l2(singles, want_singles) < FEW_TOKENS
        need = gpu_need(file.shape, plan, plan.units, probe_device()).total_bytes
        taken = split.stats().device_bytes
        assert taken <= need <= plan.vram_budget_bytes
        assert taken > need - 64 * 2**20, "the planner counts much more than is taken"


@pytest.mark.parametrize(
    ("outtype", "dense_twin"), [("f16", False), ("q4_0", False), ("q8_0", True)]
)
def test_streaming_within_a_budget(
    synth: Synth, monkeypatch: pytest.MonkeyPatch, outtype: str, dense_twin: bool
) -> None:
    """What large steps need on the device is part of the plan, and counted; small pieces, since the model is small."""
    monkeypatch.setattr(streaming, "PIECE_BYTES", 2**16)
    monkeypatch.setattr(gpu, "MAX_STREAMING_LOSS", 1.0)
    fast = MachineProfile(9e11, 2e10, 2e10, 1e10, handover_seconds=1e-7)
    here = dataclasses.replace(machine(), profile=fast)
    path, asked = synth(outtype, dense_twin), options()
    file = ModelFile(path)
    asked_here = dataclasses.replace(asked, vram_budget_bytes=budget_of(file, asked, 0.7))
    plan = plan_run(file.shape, asked_here, here)
    assert 17 <= plan.stream_tokens <= 64
    assert streaming.has_cold_neurons(file.shape, plan)
    bare = streaming.without_streaming(plan)
    need, less = (gpu_need(file.shape, p, p.units, probe_device()) for p in (plan, bare))
    assert need.total_bytes - less.total_bytes == 2 * 2**16
    with Model.open(path, asked) as cpu, Model(file, plan) as split:
        tokens = np.arange(64) + 3
        found, want = (run_chunks(model, tokens, 64) for model in (split, cpu))
        assert relative_l2(found, want) < MANY_TOKENS
        assert split.stats().device_bytes <= need.total_bytes <= plan.vram_budget_bytes


def test_bench_sweeps_budgets(
    synth: Synth, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each budget is a run with its own bound; the share that is active is that of both sides."""
    path = synth("q4_0")
    found = Bandwidth({1: 5e8}, "2026-01-31")
    monkeypatch.setattr(bench, "_bandwidth", lambda again: found)
    monkeypatch.setattr(surroundings, "machine_profile", lambda *_, **__: SLOW)
    with ModelFile(path) as file:
        asked = PlanOptions(context=4, ffn="predicted")
        budgets = [budget_of(file, asked, share) for share in (0.3, 0.7, 1.0)]
    texts = ",".join(f"{budget / 2**20}MiB" for budget in budgets)
    flags = ["-p", "0", "-n", "4", "-r", "1", "-t", "1", "--ffn", "predicted", "--json"]
    assert bench.main(["-m", str(path), "--vram-budget", texts, *flags]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["profile"]["pull_bytes_per_second"] == 2e8
    rows = record["results"]
    assert [row["vram_budget_bytes"] for row in rows] == pytest.approx(budgets, abs=1)
    assert all(0 < row["device_bytes"] <= row["vram_budget_bytes"] for row in rows)
    assert all(row["device"] for row in rows)
    bounds = [row["bound_tok_s"] for row in rows]
    assert bounds == sorted(bounds)
    reads = [row["bytes_per_token"] for row in rows]
    np.testing.assert_allclose(reads, reads[0], rtol=0.02)


def test_a_run_tells_what_its_sides_did(
    device_library: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "texts.gguf"
    monkeypatch.setitem(SHAPES, "texts", dataclasses.replace(MICRO, name="texts", n_vocab=320))
    write_synth(SynthSettings("texts", path, TensorType.Q8_0))
    monkeypatch.setattr(surroundings, "machine_profile", lambda *_, **__: SLOW)
    asked = PlanOptions(context=64, ffn="predicted")
    with ModelFile(path) as file:
        budget = f"{budget_of(file, asked, 0.5) / 2**20}MiB"
    flags = ["--ffn", "predicted", "-c", "64", "--vram-budget", budget, "-n", "4", "--ignore-eos"]
    assert cli.main(["-m", str(path), "-p", "a", *flags, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert 0 < record["device_bytes"] <= record["vram_budget_bytes"]
    assert [row["layer"] for row in record["layers"]] == [0, 1]
    split = [row for row in record["layers"] if row["side"] == "split"]
    assert split
    for row in split:
        assert row["waited"] in ("CPU", "GPU")
        assert row["gpu_seconds"] > 0 < row["cpu_seconds"]
        assert 0 <= row["handover_seconds"] <= row["gpu_wait_seconds"]
    assert cli.main(["-m", str(path), "-p", "a", *flags, "-v"]) == 0
    said = capsys.readouterr().err
    assert "a token's layers: GPU" in said
    assert "emulated device" in said or "NVIDIA" in said
