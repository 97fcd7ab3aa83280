"""Plans with a GPU: what goes there under a budget, whole layers or the hot neurons of split ones.

The budget is a ceiling over everything on the device: context, weights, KV cache, activations and scratch. Attention
and KV cache go first; where they do not fit, whole layers stay on the CPU, from the first one on. What is left
goes where it saves the most time of a token (cost.py), found by split.py.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.errors import DoesNotFit
from powerinfer_toolkit.runtime.plan.cost import (
    Floats,
    Reads,
    balanced_pull,
    layer_cost,
    token_cost,
)
from powerinfer_toolkit.runtime.plan.device import Device, probe_device
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.need import (
    gpu_need,
    layer_kv_bytes,
    layer_weight_bytes,
    memory_need,
)
from powerinfer_toolkit.runtime.plan.plan import (
    FfnMode,
    LayerPlace,
    Placement,
    Plan,
    Side,
    Tier,
    Unit,
    UnitKind,
    layer_places,
)
from powerinfer_toolkit.runtime.plan.planner import (
    PlanOptions,
    check_memory,
    format_bytes,
    plan_cpu,
    plan_sizes,
)
from powerinfer_toolkit.runtime.plan.profile import UNMEASURED, MachineProfile
from powerinfer_toolkit.runtime.plan.shape import ModelShape
from powerinfer_toolkit.runtime.plan.split import Problem, Solution, solve
from powerinfer_toolkit.runtime.plan.streaming import (
    has_cold_neurons,
    with_streaming,
    without_streaming,
)

ALL_FREE = -1  # as a budget: what is free, less RESERVE_BYTES
RESERVE_BYTES = 512 * 2**20  # left to other programs
MAX_STREAMING_LOSS = 0.03  # of decoding, above which prompts get no memory for streaming
_MOST_STEPS = 128  # in which a layer's neurons are placed


def plan_run(shape: ModelShape, options: PlanOptions, machine: Machine) -> Plan:
    """Return the plan of a run: on the CPU, and on the GPU as far as options.vram_budget_bytes says.

    A machine without a device is asked for its own. Raises what plan_cpu raises; PiError without a GPU that the
    budget could be of; DoesNotFit below the least that a run on it takes.
    """
    if not options.vram_budget_bytes:
        return plan_cpu(shape, options, machine)
    plan = plan_sizes(shape, options, machine)
    if plan.ffn_mode is FfnMode.PREDICTED and options.ffn is None and not plan.predict_all:
        plan = dataclasses.replace(plan, predict_split_only=True)
    device, profile = machine.device or probe_device(), machine.profile or UNMEASURED
    plan = with_streaming(shape, plan, profile)
    asked = options.vram_budget_bytes
    placed = place(shape, plan, asked, device, profile, may_split=options.split)
    need = memory_need(shape, placed)
    if need.pinned_bytes and need.total_bytes > machine.available_bytes:
        profile = dataclasses.replace(profile, pull_bytes_per_second=0.0)
        placed = place(shape, plan, asked, device, profile, may_split=options.split)
        need = memory_need(shape, placed)
    check_memory(need, placed.ram_budget_bytes, machine)
    return placed


def place(
    shape: ModelShape,
    plan: Plan,
    asked_bytes: int,
    device: Device,
    profile: MachineProfile = UNMEASURED,
    *,
    may_split: bool = True,
) -> Plan:
    """Return the plan with everything on the GPU where that fits, else the placement that decodes fastest.

    Where the CPU has neurons of split layers and the plan wants large steps streamed, that gets its memory unless
    decoding then takes MAX_STREAMING_LOSS longer. ALL_FREE: the budget is what is free.
    """
    budget, bare = _budget(asked_bytes, device), without_streaming(plan)
    everything = _finished(shape, bare, tuple(_moved(u, True) for u in plan.units), budget)
    if gpu_need(shape, everything, everything.units, device).total_bytes <= budget:
        return everything
    placed = _fastest(shape, bare, budget, device, profile, may_split=may_split)
    if placed is None:
        raise _too_small(shape, bare, budget, device, may_split=may_split)
    if not plan.stream_tokens or not has_cold_neurons(shape, placed):
        return placed
    streamed = _fastest(shape, plan, budget, device, profile, may_split=may_split)
    most_seconds = (1 + MAX_STREAMING_LOSS) * token_cost(shape, placed, profile).seconds
    if streamed is None or token_cost(shape, streamed, profile).seconds > most_seconds:
        return placed
    return streamed


def _fastest(
    shape: ModelShape,
    plan: Plan,
    budget: int,
    device: Device,
    profile: MachineProfile,
    *,
    may_split: bool,
) -> Plan | None:
    """Return the plan with the placement that decodes fastest; None where not even one layer fits."""
    masked = dataclasses.replace(plan, predict_split_only=False)
    for asked, head in ((plan, True), (masked, True), (masked, False)):
        layers = _Layers(shape, asked, profile)
        fixed = tuple(_moved(u, head and u.kind is UnitKind.HEAD) for u in plan.units)
        left = budget - gpu_need(shape, asked, fixed, device).total_bytes
        solution = solve(layers.problem(left, may_split=may_split))
        if solution is not None:
            return _finished(shape, asked, _with_layers(fixed, layers.places(solution)), budget)
    return None


def gpu_layers(plan: Plan) -> list[int]:
    """Return the layers that are wholly on the GPU."""
    n_layers = 1 + max(unit.layer for unit in plan.units)
    return [p.layer for p in layer_places(plan.units, n_layers) if p.side is Side.GPU]


class _Layers:
    """What each layer costs, by where it and its neurons are."""

    def __init__(self, shape: ModelShape, plan: Plan, profile: MachineProfile) -> None:
        self._shape, self._plan, self._profile = shape, plan, profile
        self._reads = Reads(shape, plan)
        self._step = max(layer.neuron_step for layer in shape.parts.layers)
        self._step *= math.ceil(shape.n_ff / self._step / _MOST_STEPS)
        self._counts = np.arange(0, shape.n_ff, self._step)

    def problem(self, budget_bytes: float, *, may_split: bool) -> Problem:
        """Return the choice that is to be made, in numbers."""
        n = range(self._shape.n_layers)
        return Problem(
            budget_bytes=budget_bytes,
            cpu_seconds=np.array([self._whole_seconds(_on_cpu(layer)) for layer in n]),
            gpu_seconds=np.array([self._whole_seconds(self._filled(layer)) for layer in n]),
            gpu_bytes=np.array([self._bytes(self._filled(layer)) for layer in n]),
            split_seconds=np.stack([self._split_seconds(layer) for layer in n]),
            split_bytes=np.stack([self._split_bytes(layer) for layer in n]),
            may_split=may_split,
            # On a CPU exact gates are dear: with layers there, those that the file may mask are masked everywhere.
            may_leave=not self._plan.predict_split_only,
        )

    def places(self, solution: Solution) -> list[LayerPlace]:
        """Return where a solution has the layers."""
        places = [_on_cpu(layer) for layer in range(solution.n_cpu)]
        for layer in range(solution.n_cpu, self._shape.n_layers):
            split = self._split_place(layer, int(self._counts[solution.steps[layer]]))
            places.append(self._filled(layer) if solution.whole[layer] else split)
        return places

    def _filled(self, layer: int) -> LayerPlace:
        return LayerPlace(layer, Side.GPU, self._shape.n_ff, self._shape.n_ff)

    def _bytes(self, place: LayerPlace) -> float:
        kv_bytes = layer_kv_bytes(self._shape, self._plan)
        return kv_bytes + layer_weight_bytes(self._shape, self._plan, place)

    def _whole_seconds(self, place: LayerPlace) -> float:
        return layer_cost(self._reads, place, self._profile, 0.0).seconds

    def _split_bytes(self, layer: int) -> Floats:
        base = self._bytes(_split(layer))
        neurons = self._shape.parts.layers[layer].device_neurons
        return np.array([base + neurons(int(n)) for n in self._counts])

    def _split_seconds(self, layer: int) -> Floats:
        place = _split(layer)
        hot, cold = self._hot_and_cold(place, self._counts)
        _, seconds = balanced_pull(hot, cold, self._profile)
        always = self._reads.always(place) / self._profile.gpu_bytes_per_second
        return seconds + always + self._profile.handover(self._plan.handover)

    def _hot_and_cold(self, place: LayerPlace, n_hot: NDArray[np.int64]) -> tuple[Floats, Floats]:
        hot = self._reads.before(place, n_hot)
        return hot, self._reads.neurons(place)[-1] - hot

    def _split_place(self, layer: int, n_hot: int) -> LayerPlace:
        """Return a split layer with as many neurons pulled as the GPU has the time for."""
        place, unit = _split(layer), self._shape.parts.layers[layer].neuron_step
        hot, cold = self._hot_and_cold(place, np.array([n_hot]))
        pulled, _ = balanced_pull(hot, cold, self._profile)
        if pulled[0] == 0.0:
            return LayerPlace(layer, Side.SPLIT, n_hot, n_hot)
        if pulled[0] >= cold[0]:
            return LayerPlace(layer, Side.SPLIT, n_hot, self._shape.n_ff)
        n_pull = self._reads.count(place, float(hot[0] + pulled[0]))
        return LayerPlace(layer, Side.SPLIT, n_hot, max(n_hot, round(n_pull / unit) * unit))


def _on_cpu(layer: int) -> LayerPlace:
    return LayerPlace(layer, Side.CPU, 0, 0)


def _split(layer: int) -> LayerPlace:
    return LayerPlace(layer, Side.SPLIT, 0, 0)


def _budget(asked_bytes: int, device: Device) -> int:
    most = device.context_bytes + device.free_bytes
    if asked_bytes == ALL_FREE:
        return most - RESERVE_BYTES
    return min(asked_bytes, most)


def _moved(unit: Unit, on_gpu: bool) -> Unit:
    return dataclasses.replace(unit, placement=Placement.GPU if on_gpu else Placement.CPU)


def _with_layers(units: tuple[Unit, ...], places: list[LayerPlace]) -> tuple[Unit, ...]:
    """Return the units with every layer's where `places` says."""
    placed: list[Unit] = []
    for unit in units:
        if unit.kind in (UnitKind.EMBEDDING, UnitKind.HEAD):
            placed.append(unit)
        elif unit.kind is UnitKind.NEURONS:
            placed += _neuron_units(unit, places[unit.layer])
        else:
            placed.append(_moved(unit, places[unit.layer].side is not Side.CPU))
    return tuple(placed)


def _neuron_units(whole: Unit, place: LayerPlace) -> list[Unit]:
    ranges = [
        (0, place.n_hot, Placement.GPU),
        (place.n_hot, place.n_pull, Placement.PULL),
        (place.n_pull, whole.end, Placement.CPU),
    ]
    return [Unit(whole.kind, whole.layer, *rest) for rest in ranges if rest[0] < rest[1]]


def _finished(shape: ModelShape, plan: Plan, units: tuple[Unit, ...], budget: int) -> Plan:
    """Return the plan with its placement; without a split layer nothing is predicted where only they would be."""
    plan = dataclasses.replace(plan, units=units, vram_budget_bytes=budget)
    split = any(p.side is Side.SPLIT for p in layer_places(units, shape.n_layers))
    if split or not plan.predict_split_only:
        return plan
    exact = (Tier(plan.max_batch_tokens, FfnMode.EXACT),)
    return dataclasses.replace(plan, tiers=exact, predict_split_only=False)


def _too_small(
    shape: ModelShape, plan: Plan, budget: int, device: Device, *, may_split: bool
) -> DoesNotFit:
    """Say what the least placement takes: the last layer, without its neurons where it may be split."""
    plan = dataclasses.replace(plan, predict_split_only=False)
    last = shape.n_layers - 1
    n = 0 if may_split else shape.n_ff
    places = [_on_cpu(layer) for layer in range(last)]
    places.append(LayerPlace(last, Side.SPLIT if may_split else Side.GPU, n, n))
    least = gpu_need(shape, plan, _with_layers(plan.units, places), device)
    mebibytes = math.ceil(least.total_bytes / 2**20)
    part = "attention and predictor of a layer" if may_split else "one layer"
    return DoesNotFit(
        f"a run on {device.name} takes at least {mebibytes} MiB: context {format_bytes(least.context_bytes)}, {part} "
        f"{format_bytes(least.weight_bytes)}, its KV cache {format_bytes(least.kv_bytes)}, activations and scratch "
        f"{format_bytes(least.working_bytes)}; the budget is {format_bytes(budget)}",
        hint=f"--vram-budget {mebibytes}MiB is the least; a smaller context (-c) or batch (-b) takes less, 0 runs "
        "on the CPU",
    )
