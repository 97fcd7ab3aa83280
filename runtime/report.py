"""What a run says of itself: the plan before, timings and the JSON record after."""

from __future__ import annotations

import hashlib
import resource
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime.engine import Stats
from powerinfer_toolkit.runtime.generate import Generation
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.plan.device import probe_device
from powerinfer_toolkit.runtime.plan.gpu import gpu_layers, gpu_need
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.plan import Plan, UnitKind
from powerinfer_toolkit.runtime.plan.planner import format_bytes, memory_need
from powerinfer_toolkit.runtime.plan.shape import ModelShape

# The parts that a placement names; a layer's other units are where its neurons are.
_PLACED_AS = {UnitKind.EMBEDDING: "embedding", UnitKind.NEURONS: "layers", UnitKind.HEAD: "head"}


def plan_line(shape: ModelShape, plan: Plan) -> str:
    """Return the plan in one line."""
    kv_bytes = memory_need(shape, plan).kv_bytes
    return (
        f"plan: {_sides(shape, plan)}, ffn {_name(plan.ffn_mode)}, {plan.n_threads} threads, "
        f"context {plan.n_context}, KV cache {format_bytes(kv_bytes)} ({_name(plan.kv_type)}), "
        f"weights {format_bytes(shape.weight_bytes)}"
    )


def plan_table(shape: ModelShape, plan: Plan, machine: Machine, isa: str) -> str:
    """Return the plan as lines of `topic  text`."""
    need = memory_need(shape, plan)
    predictor = "predictor, " if shape.has_predictors else ""
    layer = f"attention, KV, {predictor}{shape.n_ff} neurons"
    int8 = plan.activation_type is TensorType.Q8_0
    rows = {
        "model": f"{shape.n_layers} layers, {shape.n_embd} wide, {shape.n_ff} neurons, "
        f"{shape.n_heads} heads ({shape.n_kv_heads} KV), {shape.n_vocab} tokens, {shape.activation}",
        "placement": f"{_placement(plan)}; a layer is {layer}",
        "weights": f"{format_bytes(need.weight_bytes)} used, mapped from the file",
        "ffn": _tier_text(plan),
        "threads": f"{plan.n_threads}, {isa} kernels",
        "activations": "int8 blocks against quantised weights" if int8 else "float32",
        "context": f"{plan.n_context} tokens in {plan.n_sequences} sequence(s), trained for "
        f"{shape.n_ctx_train}",
        "KV cache": f"{format_bytes(need.kv_bytes)}: {plan.n_kv_pages} pages, {_name(plan.kv_type)}",
        "scratch": f"at most {format_bytes(need.scratch_bytes)} for {plan.max_batch_tokens} tokens a step",
        "memory": f"{format_bytes(need.total_bytes)} with the program's "
        f"{format_bytes(need.program_bytes)}; {_limits(plan, machine)}",
    }
    if plan.vram_budget_bytes:
        rows["GPU"] = _gpu_text(shape, plan)
    return "\n".join(f"{topic:<12}{text}" for topic, text in rows.items())


def _sides(shape: ModelShape, plan: Plan) -> str:
    n_gpu = len(gpu_layers(plan))
    if n_gpu == 0:
        return f"{shape.n_layers} layers on the CPU"
    return f"{n_gpu} of {shape.n_layers} layers on the GPU"


def _placement(plan: Plan) -> str:
    """Return every part and its side, neighbours on one side together."""
    parts = [(u.kind, u.layer, u.placement) for u in plan.units if u.kind in _PLACED_AS]
    texts = []
    for side, run in groupby(parts, key=lambda part: part[2]):
        listed = list(run)
        layers = [layer for kind, layer, _ in listed if kind is UnitKind.NEURONS]
        names = [_PLACED_AS[kind] for kind, _, _ in listed if kind is not UnitKind.NEURONS]
        span = [f"layers {layers[0]} to {layers[-1]}"] if len(layers) > 1 else []
        span += [f"layer {layers[0]}"] if len(layers) == 1 else []
        embedding = [name for name in names if name == "embedding"]
        others = [name for name in names if name != "embedding"]
        texts.append(f"{', '.join(embedding + span + others)}: {side.name}")
    return "; ".join(texts)


def _gpu_text(shape: ModelShape, plan: Plan) -> str:
    device = probe_device()
    need = gpu_need(shape, plan, plan.units, device)
    room = plan.vram_budget_bytes - need.total_bytes
    return (
        f"{device.name}: {format_bytes(need.total_bytes)} of {format_bytes(plan.vram_budget_bytes)}: context "
        f"{format_bytes(need.context_bytes)}, weights {format_bytes(need.weight_bytes)}, KV cache "
        f"{format_bytes(need.kv_bytes)}, activations and scratch {format_bytes(need.working_bytes)}, headroom "
        f"{format_bytes(max(room, 0))}"
    )


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
        texts.append(f"{_name(tier.ffn_mode)} for steps of {begin} to {tier.max_tokens} tokens")
        begin = tier.max_tokens + 1
    rule = "" if not plan.predict_all else "; every position is masked"
    return ", ".join(texts) + rule


def timing_line(generation: Generation, stats: Stats, ffn_mode: str) -> str:
    """Return speeds, the share of active neurons and a hash of the generated tokens, in one line."""
    n_decoded = max(
        0, len(generation.token_ids) - 1
    )  # the first token comes out of the prompt's step
    return (
        f"prompt {len(generation.prompt)} tokens, {_speed(len(generation.prompt), generation.prompt_seconds)}"
        f" | decode {n_decoded} tokens, {_speed(n_decoded, generation.decode_seconds)}"
        f" | ffn {ffn_mode}, {stats.active_share:.1%} active"
        f" | tokens {token_hash(generation.token_ids)}"
    )


def token_hash(token_ids: Sequence[int]) -> str:
    """Return 8 hexadecimal digits that stand for a sequence of tokens."""
    data = struct.pack(f"<{len(token_ids)}i", *token_ids)
    return hashlib.sha256(data).hexdigest()[:8]


def generation_record(
    model: Model, generation: Generation, text: str, load_seconds: float
) -> dict[str, Any]:
    """Return what pi-run --json prints of a generation."""
    return {
        "text": text,
        "token_ids": generation.token_ids,
        "prompt_tokens": len(generation.prompt),
        "decode_tokens": len(generation.token_ids),
        "prompt_seconds": generation.prompt_seconds,
        "decode_seconds": generation.decode_seconds,
        "ffn_mode": _name(model.plan.ffn_mode),
        "active_share": model.stats().active_share,
        "load_seconds": load_seconds,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def peak_rss_bytes() -> int:
    """Return the largest resident size of this process so far."""
    # Linux's getrusage also counts what the parent held when it started this process.
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def reset_peak_rss() -> None:
    """Begin to count the largest resident size anew, where the system can (Linux)."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as switch:
        switch.write("5")


def _speed(n_tokens: int, seconds: float) -> str:
    return f"{n_tokens / seconds:.1f} tok/s" if n_tokens and seconds > 0 else "- tok/s"


def _name(member: TensorType | Any) -> str:  # noqa: ANN401 - any enum
    return str(member.name).lower()
