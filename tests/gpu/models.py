"""Models of random weights, small enough for the emulated device, on the device or the CPU."""

from __future__ import annotations

import ctypes as ct
import dataclasses
from collections.abc import Callable
from pathlib import Path

from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.gpu import gpu_layers, plan_run
from powerinfer_toolkit.runtime.plan.machine import probe
from powerinfer_toolkit.runtime.plan.plan import Plan
from powerinfer_toolkit.runtime.plan.planner import PlanOptions
from powerinfer_toolkit.runtime.synth.shapes import SynthShape

N_VOCAB = 256
# Heads that the kernels for tiles of tokens take.
MICRO = SynthShape("micro", 2, 256, 512, 8, 4, N_VOCAB, 1024)
MINI = SynthShape("mini", 2, 64, 128, 2, 1, N_VOCAB, 1024)  # where only the order of work matters
NANO = SynthShape("nano", 1, 64, 64, 2, 1, N_VOCAB, 128)
WORDY = SynthShape(
    "wordy", 1, 64, 64, 2, 1, 5000, 256
)  # with a vocabulary that logits are chosen from
SHAPES_OF_TESTS = (MICRO, MINI, NANO, WORDY)

Synth = Callable[..., Path]  # see the fixture


def has_driver() -> bool:
    try:
        ct.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def options(ffn: str | None = None, **settings: object) -> PlanOptions:
    asked = PlanOptions(
        threads=2, context=128, batch=64, ffn=ffn, activation_type="f32", kv_type="f16"
    )
    return dataclasses.replace(asked, **settings)


def on_gpu(file: ModelFile, asked: PlanOptions) -> Plan:
    plan = plan_run(file.shape, dataclasses.replace(asked, vram_budget_bytes=-1), probe())
    assert gpu_layers(plan) == list(range(file.shape.n_layers))
    return plan


def opened(path: Path, asked: PlanOptions, change: Callable[[Plan], Plan] | None = None) -> Model:
    """The model on the GPU, under a plan that `change` may have changed."""
    file = ModelFile(path)
    plan = on_gpu(file, asked)
    return Model(file, plan if change is None else change(plan))
