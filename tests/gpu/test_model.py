"""Whole models on a device against the CPU: logits, splits by layer, KV cache, records, budgets.

On the GPU where a driver is, else on the emulated device. CPU engines take float32 activations. A device's steps of
up to 16 tokens differ from them by the order of float32 sums; larger ones round activations and weights to float16,
which moved SmolLM2's logits by a relative 7e-4.
"""

from __future__ import annotations

import ctypes as ct
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpu.conftest import CUDA, EMULATED, require_library
from gpu.device import library_path
from parity.closeness import relative_l2
from powerinfer_toolkit.errors import DoesNotFit
from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime.engine import Batch
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.device import probe_device
from powerinfer_toolkit.runtime.plan.gpu import gpu_layers, gpu_need, place, plan_run
from powerinfer_toolkit.runtime.plan.machine import probe
from powerinfer_toolkit.runtime.plan.plan import Placement, Plan, UnitKind
from powerinfer_toolkit.runtime.plan.planner import PlanOptions
from powerinfer_toolkit.runtime.synth.shapes import SHAPES, SynthShape
from powerinfer_toolkit.runtime.synth.write import SynthSettings, write_synth

FEW_TOKENS = 2e-5  # relative distance of logits after two layers, sums in another order
MANY_TOKENS = 3e-3
N_VOCAB = 256
# Small enough for the emulated device; heads that the kernels for tiles of tokens take.
MICRO = SynthShape("micro", 2, 256, 512, 8, 4, N_VOCAB, 512)
PROMPT = np.random.default_rng(1).integers(3, N_VOCAB, 24)
NEXT = np.random.default_rng(2).integers(3, N_VOCAB, 3)


def has_driver() -> bool:
    try:
        ct.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture(scope="module", autouse=True)
def device_library() -> Iterator[None]:
    """Without a driver libpi loads the emulated device instead; it does so once a process."""
    if has_driver():
        require_library(CUDA)
        yield
        return
    require_library(EMULATED)
    os.environ["PI_GPU_LIB"] = str(library_path(EMULATED))
    yield
    del os.environ["PI_GPU_LIB"]


@pytest.fixture(scope="module", autouse=True)
def micro_shape() -> Iterator[None]:
    SHAPES["micro"] = MICRO
    yield
    del SHAPES["micro"]


@pytest.fixture(scope="module")
def synth(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """synth(outtype, dense_twin=False) -> two layers of random weights with predictors, made once."""
    made: dict[tuple[str, bool], Path] = {}

    def write(outtype: str, dense_twin: bool = False) -> Path:
        if (outtype, dense_twin) not in made:
            path = tmp_path_factory.mktemp("synth") / f"{outtype}.gguf"
            kind = TensorType[outtype.upper()]
            write_synth(SynthSettings("micro", path, kind, n_layers=2, dense_twin=dense_twin))
            made[outtype, dense_twin] = path
        return made[outtype, dense_twin]

    return write


def options(ffn: str | None = None, **settings: object) -> PlanOptions:
    return PlanOptions(
        threads=2, context=128, batch=64, ffn=ffn, activation_type="f32", kv_type="f16", **settings
    )


def on_gpu(file: ModelFile, asked: PlanOptions) -> Plan:
    plan = plan_run(file.shape, dataclasses.replace(asked, vram_budget_bytes=-1), probe())
    assert gpu_layers(plan) == [0, 1]
    return plan


def opened(path: Path, asked: PlanOptions, change: Callable[[Plan], Plan] | None = None) -> Model:
    """The model on the GPU, under a plan that `change` may have changed."""
    file = ModelFile(path)
    plan = on_gpu(file, asked)
    return Model(file, plan if change is None else change(plan))


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
def test_logits(synth: Callable[..., Path], outtype: str, ffn: str) -> None:
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


def test_a_plain_layout_runs_dense(synth: Callable[..., Path]) -> None:
    path = synth("q8_0", dense_twin=True)
    with Model.open(path, options()) as cpu, opened(path, options()) as gpu:
        for got, want in zip(steps(gpu), steps(cpu), strict=True):
            assert relative_l2(got, want) < MANY_TOKENS


def test_few_tokens_differ_by_the_order_of_sums(synth: Callable[..., Path]) -> None:
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
def test_layers_on_either_side(synth: Callable[..., Path], split: str) -> None:
    path = synth("q8_0")
    change = lambda plan: placed(plan, SPLITS[split])  # noqa: E731
    with Model.open(path, options("exact")) as cpu, opened(path, options("exact"), change) as gpu:
        for got, want in zip(steps(gpu), steps(cpu), strict=True):
            assert relative_l2(got, want) < MANY_TOKENS
        assert gpu.stats().isa


def test_a_saved_sequence_moves_between_sides(synth: Callable[..., Path]) -> None:
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


def test_copied_and_truncated_sequences(synth: Callable[..., Path]) -> None:
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


def test_scores_and_records(synth: Callable[..., Path]) -> None:
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


def test_the_budget_is_a_ceiling_that_the_planner_knows(synth: Callable[..., Path]) -> None:
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
def test_a_budget_without_a_gpu_is_refused(synth: Callable[..., Path], budget: str) -> None:
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
