"""Plans of layers split by neurons, and small files for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type

from parity import synthetic
from parity.reference import Reference, Trace
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.machine import Machine, probe
from powerinfer_toolkit.runtime.plan.plan import Placement, Plan, Unit, UnitKind
from powerinfer_toolkit.runtime.plan.planner import PlanOptions, plan_cpu

Range = tuple[int, int]  # neurons on the device, neurons that it computes at all
CPU_LAYER: Range = (-1, -1)

CLEAR = 2e-4

# Lengths of rows that the device takes; float32, which neither side rounds.
SMALL = synthetic.Shape(n_layers=3, n_embd=96, n_ff=160, n_heads=6, ranks=(32, 32, 32))


def small_file(path: Path, shape: synthetic.Shape = SMALL, **keys: Any) -> Path:
    """A file of random float32 weights, ReLU with predictors."""
    relu = {"powerinfer.activation": "relu"}
    return synthetic.write_gguf(
        path, shape, synthetic.random_weights(shape, seed=0), keys=relu | keys
    )


def dense_file(path: Path, shape: synthetic.Shape = SMALL, down: Type = Type.F32) -> Path:
    """The same sizes in the plain layout, SiLU; `down`: the type of ffn_down."""
    weights = synthetic.dense_layout(synthetic.random_weights(shape, seed=0))
    type_of = lambda name: down if "ffn_down" in name else Type.F32  # noqa: E731
    return synthetic.write_gguf(path, shape, weights, type_of=type_of)


def split_units(ranges: Sequence[Range], n_ff: int, predictors: bool) -> Iterator[Unit]:
    """Units of a model whose embedding and head are on the CPU unless every layer is on the GPU."""
    head = Placement.CPU if CPU_LAYER in ranges else Placement.GPU
    yield Unit(UnitKind.EMBEDDING, 0, placement=head)
    yield Unit(UnitKind.HEAD, 0, placement=head)
    for layer, (hot, pull) in enumerate(ranges):
        side = Placement.CPU if (hot, pull) == CPU_LAYER else Placement.GPU
        yield Unit(UnitKind.ATTENTION, layer, placement=side)
        yield Unit(UnitKind.KV, layer, placement=side)
        if predictors:
            yield Unit(UnitKind.PREDICTOR, layer, placement=side)
        bounds = (max(hot, 0), max(pull, 0))
        places = (Placement.GPU, Placement.PULL, Placement.CPU)
        for begin, end, place in zip((0, *bounds), (*bounds, n_ff), places, strict=True):
            if begin < end:
                yield Unit(UnitKind.NEURONS, layer, begin, end, place)


def options(ffn: str | None = None, **settings: Any) -> PlanOptions:
    asked = PlanOptions(
        threads=2, context=128, batch=64, ffn=ffn, activation_type="f32", kv_type="f32"
    )
    return dataclasses.replace(asked, **settings)


def machine() -> Machine:
    return probe()


def split_plan(
    file: ModelFile, asked: PlanOptions, ranges: Sequence[Range], **changes: Any
) -> Plan:
    plan = plan_cpu(file.shape, asked, machine())
    units = tuple(split_units(ranges, file.shape.n_ff, file.shape.has_predictors))
    return dataclasses.replace(plan, units=units, vram_budget_bytes=2**31, **changes)


def opened(path: Path, asked: PlanOptions, ranges: Sequence[Range], **changes: Any) -> Model:
    file = ModelFile(path)
    return Model(file, split_plan(file, asked, ranges, **changes))


def clear_text(path: Path, masked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and their float64 logits, such that no predictor logit is within CLEAR of the threshold.

    Closer to it the rounding of what is handed over (test_hybrid.py) could drop or add a neuron.
    """
    reference = Reference.load(path)
    for seed in range(400):
        tokens, trace = np.random.default_rng(seed).integers(3, SMALL.n_vocab, masked.size), Trace()
        logits = reference.logits(tokens.tolist(), masked=masked, trace=trace)
        if all(np.abs(margins).min() >= CLEAR for margins in trace.margins):
            return tokens, logits
    raise AssertionError("no clear text")
