"""Whole models on a device against the CPU: logits, splits by layer, KV cache, records, budgets.

On the GPU where a driver is, else on the emulated device. CPU engines take float32 activations. A device's steps of
up to 16 tokens differ from them by the order of float32 sums; larger ones round activations and weights to float16,
which moved SmolLM2's logits by a relative 7e-4.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from gpu.models import N_VOCAB, Synth, has_driver, on_gpu, opened, options
from parity.closeness import relative_l2
from powerinfer_toolkit.errors import DoesNotFit
from powerinfer_toolkit.runtime.engine import Batch
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.device import probe_device
from powerinfer_toolkit.runtime.plan.gpu import gpu_need, place
from powerinfer_toolkit.runtime.plan.plan import Placement, Plan, UnitKind

# Relative distance of logits after two layers. A vector rounded to 16 bits, the largest of 32 elements to 32512, is
# 2e-5 off (that one being 2.3 standard deviations); a layer rounds four in a row, the head one: 3 * 2e-5 together.
FEW_TOKENS = 1e-4
MANY_TOKENS = 3e-3
PROMPT = np.random.default_rng(1).integers(3, N_VOCAB, 24)
NEXT = np.random.default_rng(2).integers(3, N_VOCAB, 3)


def steps(model: Model) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a prompt's tokens, and of single tokens after it."""
    prompt = model.logits(PROMPT)
    singles = []
    for token in NEXT:
        model.engine.run(Batch([token], want_logits=True))
        singles.append(model.engine.logits()[0])
    return prompt, np.array(singles)


@pytest.mark.parametrize("ffn", ["exact", "predicted", "dense"])
@pytest.mark.parametrize("outtype", ["f16", "q8_0", "q4_0"])
def test_logits(synth: Synth, outtype: str, ffn: str) -> None:
    path = synth(outtype)
    with Model.open(path, options(ffn)) as cpu, opened(path, options(ffn)) as gpu:
        for got, want in zip(steps(gpu), steps(cpu), strict=True):
            assert relative_l2(got, want) < MANY_TOKENS
        a, b = gpu.stats(), cpu.stats()
        assert (a.neurons_total, a.n_tokens) == (b.neurons_total, b.n_tokens)
        # A pre-activation beside 0 may fall on either side.
        assert a.neurons_active == pytest.approx(b.neurons_active, rel=2e-3)
        assert a.neurons_guessed == pytest.approx(b.neurons_guessed, rel=2e-3)
        assert a.device
        assert a.device_bytes > a.device_context_bytes > 0


def test_a_plain_layout_runs_dense(synth: Synth) -> None:
    path = synth("q8_0", dense_twin=True)
    with Model.open(path, options()) as cpu, opened(path, options()) as gpu:
        for got, want in zip(steps(gpu), steps(cpu), strict=True):
            assert relative_l2(got, want) < MANY_TOKENS


def test_few_tokens_differ_by_the_rounding_of_vectors(synth: Synth) -> None:
    path = synth("q4_0")
    asked = dataclasses.replace(options("exact"), kv_type="f32")
    with Model.open(path, asked) as cpu, opened(path, asked) as gpu:
        for token in NEXT:
            for model in (cpu, gpu):
                model.engine.run(Batch([token], want_logits=True))
            assert relative_l2(gpu.engine.logits(), cpu.engine.logits()) < FEW_TOKENS


SPLITS = {
    "last layer and head": lambda unit: unit.layer == 1 or unit.kind is UnitKind.HEAD,
    "all but the head": lambda unit: unit.kind is not UnitKind.HEAD,
    "last layer alone": lambda unit: unit.layer == 1,
    "head alone": lambda unit: unit.kind is UnitKind.HEAD,
}


def placed(plan: Plan, on_device: Callable[..., bool]) -> Plan:
    side = {True: Placement.GPU, False: Placement.CPU}
    units = (dataclasses.replace(u, placement=side[bool(on_device(u))]) for u in plan.units)
    return dataclasses.replace(plan, units=tuple(units))


@pytest.mark.parametrize("split", SPLITS)
def test_layers_on_either_side(synth: Synth, split: str) -> None:
    path = synth("q8_0")
    change = lambda plan: placed(plan, SPLITS[split])  # noqa: E731
    with Model.open(path, options("exact")) as cpu, opened(path, options("exact"), change) as gpu:
        for got, want in zip(steps(gpu), steps(cpu), strict=True):
            assert relative_l2(got, want) < MANY_TOKENS
        assert gpu.stats().isa


def test_a_saved_sequence_moves_between_sides(synth: Synth) -> None:
    path = synth("f16")
    with Model.open(path, options("exact")) as cpu, opened(path, options("exact")) as gpu:
        gpu.engine.run(Batch(PROMPT))
        cpu.engine.kv_load(0, gpu.engine.kv_save(0))
        for model in (cpu, gpu):
            model.engine.run(Batch([NEXT[0]], want_logits=True))
        assert relative_l2(gpu.engine.logits(), cpu.engine.logits()) < FEW_TOKENS * 10
        gpu.engine.kv_load(0, cpu.engine.kv_save(0))
        for model in (cpu, gpu):
            model.engine.run(Batch([NEXT[1]], want_logits=True))
        assert relative_l2(gpu.engine.logits(), cpu.engine.logits()) < FEW_TOKENS * 10


def test_copied_and_truncated_sequences(synth: Synth) -> None:
    """A shared page is duplicated before it is written, also on the device."""
    asked = dataclasses.replace(options("exact"), sequences=2)
    with opened(synth("f16"), asked) as gpu:
        engine = gpu.engine
        engine.run(Batch(PROMPT[:10]))
        engine.kv_copy(0, 1)
        engine.run(Batch(NEXT[[0, 1]], sequences=[0, 1], want_logits=True))
        both = engine.logits().copy()
        for sequence in (0, 1):
            engine.kv_truncate(sequence, 10)
            engine.run(Batch([NEXT[sequence]], sequences=sequence, want_logits=True))
            assert relative_l2(engine.logits()[0], both[sequence]) < FEW_TOKENS


def test_scores_and_records(synth: Synth) -> None:
    path = synth("q8_0")
    tokens = np.concatenate([PROMPT, NEXT])
    with Model.open(path, options("exact")) as cpu, opened(path, options("exact")) as gpu:
        np.testing.assert_allclose(gpu.score(tokens), cpu.score(tokens), atol=2e-2)
        fired = []
        for model in (cpu, gpu):
            model.engine.record_fired(True)
            model.engine.kv_truncate(0, 0)
            model.engine.run(Batch(PROMPT))
            many = model.engine.fired()
            model.engine.run(Batch(NEXT[:2]))
            fired.append(np.concatenate([many, model.engine.fired()]))
        assert (fired[0] != fired[1]).mean() < 1e-3
        assert fired[0].any()


def test_the_budget_is_a_ceiling_that_the_planner_knows(synth: Synth) -> None:
    path, asked = synth("q4_0"), options("predicted")
    device = probe_device()
    with ModelFile(path) as file:
        shape = file.shape
        whole = on_gpu(file, asked)
        everything = gpu_need(shape, whole, whole.units, device).total_bytes
        one_less = place(shape, whole, everything - 1, device)
        assert [u.kind for u in one_less.units if u.placement is Placement.CPU] == [
            UnitKind.EMBEDDING
        ]
        with pytest.raises(DoesNotFit, match="takes at least") as failure:
            place(shape, whole, device.context_bytes + 2**20, device)
    least = int(str(failure.value).split("at least ")[1].split(" MiB")[0]) * 2**20
    for budget in (least, (least + everything) // 2, everything):
        with opened(path, asked, lambda plan, b=budget: place(shape, plan, b, device)) as gpu:
            steps(gpu)
            stats = gpu.stats()
            need = gpu_need(shape, gpu.plan, gpu.plan.units, device).total_bytes
            assert stats.device_bytes <= need <= budget
            assert stats.device_bytes > need - 32 * 2**20, (
                "the planner counts much more than is taken"
            )


@pytest.mark.parametrize("budget", ["4", "-1", "6000MiB"])
def test_a_budget_without_a_gpu_is_refused(synth: Synth, budget: str) -> None:
    if has_driver():
        return  # the other tests are about that
    environment = {name: value for name, value in os.environ.items() if name != "PI_GPU_LIB"}
    command = [sys.executable, "-m", "powerinfer_toolkit.runtime.cli", "--vram-budget", budget]
    said = subprocess.run(
        [*command, "-m", str(synth("f16")), "-p", "w1"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 1
    assert said.stderr.startswith("error: no NVIDIA driver"), said.stderr
    assert "--vram-budget 0" in said.stderr
