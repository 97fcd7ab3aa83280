"""What a plan says of itself before the run: a line, a table, warnings, and the record of a dry run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime.plan.cost import LayerCost, Reads, TokenCost, token_cost
from powerinfer_toolkit.runtime.plan.device import Device
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.need import (
    GpuNeed,
    gpu_need,
    layer_kv_bytes,
    layer_weight_bytes,
    memory_need,
    pinned_bytes,
)
from powerinfer_toolkit.runtime.plan.plan import (
    FfnMode,
    LayerPlace,
    Placement,
    Plan,
    Side,
    UnitKind,
    layer_places,
)
from powerinfer_toolkit.runtime.plan.planner import format_bytes
from powerinfer_toolkit.runtime.plan.profile import UNMEASURED, MachineProfile
from powerinfer_toolkit.runtime.plan.shape import ModelShape
from powerinfer_toolkit.runtime.plan.streaming import has_cold_neurons


def plan_line(shape: ModelShape, plan: Plan) -> str:
    """Return the plan in one line."""
    kv_bytes = layer_kv_bytes(shape, plan) * shape.n_layers
    return (
        f"plan: {_sides(shape, plan)}, ffn {name(plan.ffn_mode)}, {plan.n_threads} threads, "
        f"context {plan.n_context}, KV cache {format_bytes(kv_bytes)} ({name(plan.kv_type)}), "
        f"weights {format_bytes(shape.weight_bytes)}"
    )


def _sides(shape: ModelShape, plan: Plan) -> str:
    sides = [place.side for place in layer_places(plan.units, shape.n_layers)]
    if set(sides) == {Side.CPU}:
        return f"{shape.n_layers} layers on the CPU"
    counts = {
        "on the GPU": sides.count(Side.GPU),
        "split": sides.count(Side.SPLIT),
        "on the CPU": sides.count(Side.CPU),
    }
    told = [f"{n} {text}" for text, n in counts.items() if n]
    return f"of {shape.n_layers} layers " + ", ".join(told)


def plan_table(shape: ModelShape, plan: Plan, machine: Machine, isa: str) -> str:
    """Return the plan as lines of `topic  text`, and a row for every kind of layer where a GPU is used."""
    need = memory_need(shape, plan)
    int8 = plan.activation_type is TensorType.Q8_0
    pinned = f", {format_bytes(need.pinned_bytes)} pinned for the GPU" if need.pinned_bytes else ""
    rows = {
        "model": f"{shape.n_layers} layers, {shape.n_embd} wide, {shape.n_ff} neurons, "
        f"{shape.n_heads} heads ({shape.n_kv_heads} KV), {shape.n_vocab} tokens, {shape.activation}",
        "placement": _placement(shape, plan),
        "weights": f"{format_bytes(need.weight_bytes)} used, mapped from the file{pinned}",
        "ffn": _tier_text(plan),
        "threads": f"{plan.n_threads}, {isa} kernels",
        "activations": "int8 blocks against quantised weights" if int8 else "float32",
        "context": f"{plan.n_context} tokens in {plan.n_sequences} sequence(s), trained for "
        f"{shape.n_ctx_train}",
        "KV cache": f"{format_bytes(need.kv_bytes)} in RAM: {plan.n_kv_pages} pages, {name(plan.kv_type)}",
        "scratch": f"at most {format_bytes(need.scratch_bytes)} for {plan.max_batch_tokens} tokens a step",
        "memory": f"{format_bytes(need.total_bytes)} with the program's "
        f"{format_bytes(need.program_bytes)}; {_limits(plan, machine)}",
    }
    lines = [f"{topic:<12}{text}" for topic, text in rows.items()]
    if plan.uses_gpu and machine.device:
        lines += _gpu_lines(shape, plan, machine.device, machine.profile or UNMEASURED)
    return "\n".join(lines)


def _placement(shape: ModelShape, plan: Plan) -> str:
    """Return every part and its side, neighbouring layers on one side together."""
    ends = {u.kind: u.placement.name for u in plan.units if u.layer == 0 and u.kind in _ENDS}
    texts = [f"embedding: {ends[UnitKind.EMBEDDING]}"]
    for side, run in groupby(layer_places(plan.units, shape.n_layers), key=lambda p: p.side):
        listed = list(run)
        texts.append(f"{_span(listed)}: {side}")
    return "; ".join([*texts, f"head: {ends[UnitKind.HEAD]}"])


_ENDS = (UnitKind.EMBEDDING, UnitKind.HEAD)


def _span(places: list[LayerPlace]) -> str:
    first, last = places[0].layer, places[-1].layer
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def _gpu_lines(
    shape: ModelShape, plan: Plan, device: Device, profile: MachineProfile
) -> Iterator[str]:
    need = gpu_need(shape, plan, plan.units, device)
    room = max(0, plan.vram_budget_bytes - need.total_bytes)
    yield (
        f"{'GPU':<12}{device.name}: {format_bytes(need.total_bytes)} of {format_bytes(plan.vram_budget_bytes)}: "
        f"context {format_bytes(need.context_bytes)}, weights {format_bytes(need.weight_bytes)}, KV cache "
        f"{format_bytes(need.kv_bytes)}, activations and scratch {format_bytes(need.working_bytes)}, headroom "
        f"{format_bytes(room)}"
    )
    if has_cold_neurons(shape, plan):
        yield f"{'prompts':<12}{_streaming_text(plan)}"
    cost = token_cost(shape, plan, profile)
    yield (
        f"{'expected':<12}{cost.seconds * 1e3:.3g} ms a token, {1 / cost.seconds:.4g} tok/s, after "
        f"{plan.n_context // 2} tokens, if all is read as fast as memory allows; {_rates_text(profile)}"
    )
    yield from _layer_table(shape, plan, cost)


def _streaming_text(plan: Plan) -> str:
    if not plan.stream_tokens:
        return (
            "the CPU computes its neurons of split layers in steps of any size: streaming their weights through "
            "the GPU is no faster there, of unknown speed, or takes memory that decoding needs"
        )
    return (
        f"steps of {plan.stream_tokens} tokens and more compute the CPU's neurons on the GPU, which their weights "
        f"pass through: {format_bytes(2 * plan.stream_piece_bytes)} of its scratch"
    )


def _rates_text(profile: MachineProfile) -> str:
    gpu, cpu = profile.gpu_bytes_per_second / 1e9, profile.cpu_bytes_per_second / 1e9
    known = "assumed" if profile == UNMEASURED else "measured"
    pull = profile.pull_bytes_per_second / 1e9
    pulled = f", pulled {pull:.3g}" if pull else ", pulled: not known"
    return f"{known} GB/s: GPU {gpu:.4g}, CPU {cpu:.3g}{pulled}"


_TITLES = {
    "layers": 8,
    "side": 5,
    "hot": 7,
    "pulled": 7,
    "cold": 7,
    "GPU MiB": 8,
    "pinned": 7,
    "CPU MiB": 8,
    "hot %": 6,
    "pull %": 6,
    "cold %": 6,
    "GPU us": 7,
    "CPU us": 7,
    "waits": 5,
}


def _layer_table(shape: ModelShape, plan: Plan, cost: TokenCost) -> Iterator[str]:
    """Yield a row for each run of layers that look alike: neurons, bytes, shares of the activations, times."""
    rows = layer_rows(shape, plan, cost)
    yield " ".join(f"{title:>{width}}" for title, width in _TITLES.items())
    for cells, run in groupby(rows, key=_cells):
        listed = [row["layer"] for row in run]
        span = str(listed[0]) if len(listed) == 1 else f"{listed[0]}-{listed[-1]}"
        pairs = zip([span, *cells], _TITLES.values(), strict=True)
        yield " ".join(f"{cell:>{width}}" for cell, width in pairs)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    counts = (row["n_hot"], row["n_pulled"], row["n_cold"])
    sizes = (row["gpu_weight_bytes"], row["pinned_bytes"], row["cpu_weight_bytes"])
    shares = (row["hot_share"], row["pulled_share"], row["cold_share"])
    seconds = (row["gpu_seconds"], row["cpu_seconds"])
    return (
        row["side"],
        *map(str, counts),
        *(f"{n_bytes / 2**20:.0f}" for n_bytes in sizes),
        *(f"{share:.1%}" for share in shares),
        *(f"{second * 1e6:.0f}" for second in seconds),
        row["waits"] or "-",
    )


def layer_rows(shape: ModelShape, plan: Plan, cost: TokenCost) -> list[dict[str, Any]]:
    """Return what is expected of every layer. Shares are of the layer's activations; times those of its neurons."""
    reads = Reads(shape, plan)
    return [_layer_row(shape, plan, reads, layer) for layer in cost.layers]


def _layer_row(shape: ModelShape, plan: Plan, reads: Reads, cost: LayerCost) -> dict[str, Any]:
    place, size = cost.place, shape.parts.layers[cost.place.layer]
    on_gpu, on_cpu = place.side is not Side.CPU, place.side is Side.CPU
    n_cold = shape.n_ff - place.n_pull
    cold_bytes = (size.gate + size.up_down) * n_cold // shape.n_ff
    hot, pulled, cold = reads.activation_shares(place)
    waits = None
    if place.side is Side.SPLIT:
        waits = "CPU" if cost.gpu_seconds > cost.cpu_seconds else "GPU"
    return {
        "layer": place.layer,
        "side": str(place.side),
        "n_hot": place.n_hot,
        "n_pulled": place.n_pull - place.n_hot,
        "n_cold": n_cold,
        "gpu_weight_bytes": layer_weight_bytes(shape, plan, place) if on_gpu else 0,
        "pinned_bytes": pinned_bytes(shape, place),
        "cpu_weight_bytes": cold_bytes + (size.attention if on_cpu else 0),
        "hot_share": hot,
        "pulled_share": pulled,
        "cold_share": cold,
        "gpu_seconds": cost.gpu_seconds,
        "cpu_seconds": cost.cpu_seconds,
        "seconds": cost.seconds,
        "waits": waits,
    }


def dry_run_record(shape: ModelShape, plan: Plan, machine: Machine) -> str:
    """Return the plan as JSON, with what is expected of it where a GPU is used; Plan.from_json reads it."""
    record: dict[str, Any] = json.loads(plan.to_json())
    need = memory_need(shape, plan)
    record["expected"] = {"memory_bytes": need.total_bytes, "memory": asdict(need)}
    if plan.uses_gpu and machine.device:
        record["expected"] |= _gpu_record(shape, plan, machine, machine.device)
    return json.dumps(record, indent=1)


def _gpu_record(shape: ModelShape, plan: Plan, machine: Machine, device: Device) -> dict[str, Any]:
    need: GpuNeed = gpu_need(shape, plan, plan.units, device)
    cost = token_cost(shape, plan, machine.profile or UNMEASURED)
    return {
        "machine": machine.to_record(),
        "gpu_bytes": need.total_bytes,
        "gpu": asdict(need),
        "seconds_per_token": cost.seconds,
        "layers": layer_rows(shape, plan, cost),
    }


def warnings(shape: ModelShape, plan: Plan, machine: Machine) -> list[str]:
    """Return what to say of weights that will not stay in memory, and of threads without a core."""
    texts = []
    need = memory_need(shape, plan).total_bytes
    if need > machine.available_bytes:
        texts.append(
            f"this run uses {format_bytes(need)} of memory and {format_bytes(machine.available_bytes)} are "
            "available: weights will be read from the disk again and again"
        )
    if plan.n_threads > machine.n_cores:
        texts.append(
            f"{plan.n_threads} threads share the {machine.n_cores} cores that this process may use, "
            "which is slower than a thread for each core: lower -t"
        )
    return texts


def _limits(plan: Plan, machine: Machine) -> str:
    available = f"{format_bytes(machine.available_bytes)} available"
    if plan.ram_budget_bytes is None:
        return available
    return f"budget {format_bytes(plan.ram_budget_bytes)}, {available}"


def _tier_text(plan: Plan) -> str:
    texts, begin = [], 1
    for tier in plan.tiers:
        texts.append(f"{name(tier.ffn_mode)} for steps of {begin} to {tier.max_tokens} tokens")
        begin = tier.max_tokens + 1
    rule = "" if not plan.predict_all else "; every position is masked"
    rule += "; layers that are not split are exact" if plan.predict_split_only else ""
    return ", ".join(texts) + rule


def name(member: TensorType | FfnMode | Placement) -> str:
    """Return an enum's member as the command line has it."""
    return member.name.lower()
