"""Plans with a GPU: whole layers with their KV go there as far as a budget allows, the others stay on the CPU.

The budget is a ceiling over everything on the device: context, weights, KV cache, activations and scratch. The
sizes counted here are those that runtime/native/src/gpu/stream.cpp and forward.cpp allocate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from powerinfer_toolkit.errors import DoesNotFit, PiError
from powerinfer_toolkit.runtime.plan.device import Device, probe_device
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.plan import (
    PAGE_TOKENS,
    FfnMode,
    Placement,
    Plan,
    Unit,
    UnitKind,
)
from powerinfer_toolkit.runtime.plan.planner import (
    PlanOptions,
    format_bytes,
    kv_token_bytes,
    plan_cpu,
)
from powerinfer_toolkit.runtime.plan.shape import DeviceBytes, ModelShape

ALL_FREE = -1  # as a budget: what is free, less RESERVE_BYTES
RESERVE_BYTES = 512 * 2**20  # left to other programs
TILE_BYTES = 32 * 2**20  # that the device library dequantises at a time
ROUNDING_BYTES = 16 * 2**20  # of allocations to pages of the device
LOGIT_ROWS = 64  # rows of the head computed at a time


@dataclass(frozen=True)
class GpuNeed:
    """Bytes that a placement takes on the device."""

    context_bytes: int
    weight_bytes: int
    kv_bytes: int
    working_bytes: int  # activations, lists and scratch

    @property
    def total_bytes(self) -> int:
        """Everything."""
        return self.context_bytes + self.weight_bytes + self.kv_bytes + self.working_bytes


@dataclass(frozen=True)
class _Choice:
    first_layer: int  # layers from here on are on the GPU
    embedding: bool
    head: bool


def plan_run(shape: ModelShape, options: PlanOptions, machine: Machine) -> Plan:
    """Return the plan of a run: on the CPU, and on the GPU as far as options.vram_budget_bytes says.

    Raises what plan_cpu raises; PiError without a GPU that the budget could be of; DoesNotFit below the
    least that a run on it takes.
    """
    plan = plan_cpu(shape, options, machine)
    if not options.vram_budget_bytes:
        return plan
    return place(shape, plan, options.vram_budget_bytes, probe_device())


def place(shape: ModelShape, plan: Plan, asked_bytes: int, device: Device) -> Plan:
    """Return the plan with as many of the last layers on the GPU as the budget takes; ALL_FREE: what is free."""
    budget = _budget(asked_bytes, device)
    for choice in _choices(shape):
        if gpu_need(shape, plan, _placed(plan.units, choice), device).total_bytes <= budget:
            units = _placed(plan.units, choice)
            return dataclasses.replace(plan, units=units, vram_budget_bytes=budget)
    least = gpu_need(shape, plan, _placed(plan.units, choice), device)
    mebibytes = math.ceil(least.total_bytes / 2**20)
    raise DoesNotFit(
        f"a run on {device.name} takes at least {mebibytes} MiB: context {format_bytes(least.context_bytes)}, one "
        f"layer {format_bytes(least.weight_bytes)}, its KV cache {format_bytes(least.kv_bytes)}, activations and "
        f"scratch {format_bytes(least.working_bytes)}; the budget is {format_bytes(budget)}",
        hint=f"--vram-budget {mebibytes}MiB is the least; a smaller context (-c) or batch (-b) takes less, 0 runs "
        "on the CPU",
    )


def gpu_layers(plan: Plan) -> list[int]:
    """Return the layers that are on the GPU."""
    return [
        u.layer for u in plan.units if u.kind is UnitKind.NEURONS and u.placement is Placement.GPU
    ]


def gpu_need(shape: ModelShape, plan: Plan, units: tuple[Unit, ...], device: Device) -> GpuNeed:
    """Return what these units take on the device under the plan's sizes."""
    sizes = _sizes(shape)
    here = {(u.kind, u.layer) for u in units if u.placement is Placement.GPU}
    layers = [i for i in range(shape.n_layers) if (UnitKind.NEURONS, i) in here]
    weights = sum(sizes.layers[i] for i in layers)
    if plan.tiers[0].ffn_mode is FfnMode.PREDICTED:
        weights += sum(sizes.predictors[i] for i in layers)
    embedding, head = (UnitKind.EMBEDDING, 0) in here, (UnitKind.HEAD, 0) in here
    if head:
        weights += 256 * math.ceil(shape.n_embd / 64) + (sizes.head or sizes.embedding)
    if embedding and not (head and sizes.head == 0):
        weights += sizes.embedding
    kv = plan.n_kv_pages * PAGE_TOKENS * kv_token_bytes(shape, plan) // shape.n_layers * len(layers)
    working = _working_bytes(shape, plan, sizes.predictor_rank, device)
    return GpuNeed(device.context_bytes, weights, kv, working)


def _sizes(shape: ModelShape) -> DeviceBytes:
    if shape.device is None:
        raise PiError("the shape says nothing of a GPU's memory")
    return shape.device


def _budget(asked_bytes: int, device: Device) -> int:
    most = device.context_bytes + device.free_bytes
    if asked_bytes == ALL_FREE:
        return most - RESERVE_BYTES
    return min(asked_bytes, most)


def _choices(shape: ModelShape) -> Iterator[_Choice]:
    """Yield placements from the largest to the smallest."""
    yield _Choice(0, embedding=True, head=True)
    for first in range(shape.n_layers):
        yield _Choice(first, embedding=False, head=True)
    yield _Choice(shape.n_layers - 1, embedding=False, head=False)


def _placed(units: tuple[Unit, ...], choice: _Choice) -> tuple[Unit, ...]:
    def here(unit: Unit) -> bool:
        if unit.kind is UnitKind.EMBEDDING:
            return choice.embedding
        return choice.head if unit.kind is UnitKind.HEAD else unit.layer >= choice.first_layer

    side = {True: Placement.GPU, False: Placement.CPU}
    return tuple(dataclasses.replace(unit, placement=side[here(unit)]) for unit in units)


def _working_bytes(shape: ModelShape, plan: Plan, rank: int, device: Device) -> int:
    n, n_q = plan.max_batch_tokens, shape.n_heads * shape.head_dim
    n_kv = shape.n_kv_heads * shape.head_dim
    row = 3 * shape.n_embd + 2 * n_q + 2 * n_kv + shape.n_rot
    floats = n * row + min(n, LOGIT_ROWS) * shape.n_vocab
    lists = 2 * n * shape.n_ff + 5 * shape.n_ff + rank + 2 * n + n * math.ceil(shape.n_ff / 64) * 2
    pages = math.ceil(plan.n_context / PAGE_TOKENS)
    step = 6 * n + min(n, plan.n_sequences) * pages + 2 * n * math.ceil(n / 64)
    attention = (n * shape.n_heads + 4 * device.n_processors) * (shape.head_dim + 2)
    sums = (2 * device.n_processors + shape.n_embd // 1024 + 1) * 1024
    longest = max(shape.n_ff, shape.n_embd, n_q) + 32
    halves = n * (2 * longest + 4)
    tile = TILE_BYTES + 64 * longest
    return 4 * (floats + lists + step + max(attention, sums)) + halves + tile + ROUNDING_BYTES
