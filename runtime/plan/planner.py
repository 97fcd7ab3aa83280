"""The planner: shapes, options and a machine in, a plan or a clear refusal out; nothing is allocated.

A CPU-only plan uses every unit from the mapped file; what it decides are FFN modes, sizes and types.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from powerinfer_toolkit.errors import DoesNotFit, UsageError
from powerinfer_toolkit.gguf_format import Activation, TensorType
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.need import MemoryNeed, memory_need
from powerinfer_toolkit.runtime.plan.plan import (
    PAGE_TOKENS,
    FfnMode,
    HandOver,
    Plan,
    Tier,
    Unit,
    UnitKind,
)
from powerinfer_toolkit.runtime.plan.shape import ModelShape

DEFAULT_CONTEXT = 4096
DEFAULT_BATCH = 512
MAX_BATCH = 65536
MAX_SEQUENCES = 4096
MAX_THREADS = 1024
THREADS_PER_CPU = 4
MAX_PERPLEXITY_LOSS = 0.01  # above it predicted mode is never chosen unasked
# Steps this small are masked; larger ones touch nearly every neuron anyway, so they run exactly.
PREDICTION_TIERS = (1, 4, 16)
KV_TYPES = {"f32": TensorType.F32, "f16": TensorType.F16}
ACTIVATION_TYPES = {"f32": TensorType.F32, "q8_0": TensorType.Q8_0}
HANDOVERS = {member.name.lower().replace("_", "-"): member for member in HandOver}
T = TypeVar("T")
_FLOAT32_MAX = float.fromhex("0x1.fffffep127")


@dataclass(frozen=True)
class PlanOptions:
    """What the user may ask for; None leaves the choice to the planner.

    `context` 0 means what the model was trained for. Types and modes go by their names on the command
    line: `ffn` dense, exact, predicted; `kv_type` f32, f16; `activation_type` f32, q8_0. `ram_budget_bytes` is
    a ceiling over everything in MemoryNeed; without one only what has to be allocated is held against the
    available memory, since mapped weights can be read again. `vram_budget_bytes`: None or 0 runs on the CPU,
    -1 takes what is free on the GPU (see gpu.py). Without `split` every layer is whole on one side; `handover`
    is how the sides of a split one wait: auto, spin, wait-value, event. `cpus` are the logical processors of
    the threads.
    """

    threads: int | None = None
    context: int | None = None
    batch: int = DEFAULT_BATCH
    sequences: int = 1
    ffn: str | None = None
    predict_all: bool = False
    kv_type: str | None = None
    activation_type: str | None = None
    sparse_threshold: float | None = None
    isa: str | None = None
    ram_budget_bytes: int | None = None
    vram_budget_bytes: int | None = None
    cpus: tuple[int, ...] | None = None
    split: bool = True
    handover: str | None = None


def plan_cpu(shape: ModelShape, options: PlanOptions, machine: Machine) -> Plan:
    """Return the plan of a run on the CPU.

    Raises UsageError for an option that this model or machine cannot honour, DoesNotFit when the KV cache
    and scratch exceed the available memory, or the whole run a budget.
    """
    plan = plan_sizes(shape, options, machine)
    check_memory(memory_need(shape, plan), plan.ram_budget_bytes, machine)
    return plan


def plan_sizes(shape: ModelShape, options: PlanOptions, machine: Machine) -> Plan:
    """Return the plan on the CPU without a look at memory: modes, sizes, types. Raises UsageError."""
    mode = choose_ffn_mode(shape, options.ffn, options.predict_all)
    n_context = _choose_context(shape, options.context)
    n_sequences = _in_range("sequences", options.sequences, 1, MAX_SEQUENCES)
    batch = _in_range("batch", options.batch, 1, MAX_BATCH)
    batch = min(batch, n_context * n_sequences)
    floats = shape.float32_weights or options.activation_type == "f32"
    kv_name = options.kv_type or ("f32" if floats else "f16")
    return Plan(
        units=_units(shape),
        tiers=_tiers(mode, batch, options.predict_all),
        n_threads=_choose_threads(options, machine),
        max_batch_tokens=batch,
        n_sequences=n_sequences,
        n_context=n_context,
        n_kv_pages=n_sequences * math.ceil(n_context / PAGE_TOKENS),
        kv_type=_by_name("KV type", kv_name, KV_TYPES),
        activation_type=_by_name(
            "activation type", options.activation_type or "q8_0", ACTIVATION_TYPES
        ),
        predict_all=options.predict_all,
        sparse_threshold=_checked_threshold(options.sparse_threshold, mode),
        isa=options.isa,
        ram_budget_bytes=_checked_budget(options.ram_budget_bytes),
        cpus=options.cpus,
        handover=_by_name("hand-over", options.handover or "auto", HANDOVERS),
    )


def available_modes(shape: ModelShape) -> tuple[FfnMode, ...]:
    """Return the FFN modes that the file supports."""
    if shape.activation is not Activation.RELU or not shape.sparse_layout:
        return (FfnMode.DENSE,)
    if not shape.predictable:
        return (FfnMode.DENSE, FfnMode.EXACT)
    return (FfnMode.DENSE, FfnMode.EXACT, FfnMode.PREDICTED)


def choose_ffn_mode(shape: ModelShape, asked: str | None, predict_all: bool = False) -> FfnMode:
    """Return the mode asked for, else the default of the file; UsageError when it cannot run so.

    The default is exact where the file allows it, and predicted only where the file records a perplexity
    loss of at most 1%. `predict_all` asks for predicted.
    """
    if predict_all and asked not in (None, "predicted"):
        raise UsageError(
            f"predict-all masks every position, which FFN mode {asked} never does",
            hint="use it with --ffn predicted",
        )
    modes = available_modes(shape)
    if asked is None and not predict_all:
        return _default_mode(shape, modes)
    mode = _by_name("FFN mode", asked or "predicted", {m.name.lower(): m for m in FfnMode})
    if mode not in modes:
        names = ", ".join(m.name.lower() for m in modes)
        raise UsageError(_why_not(shape, mode), hint=f"FFN modes of this file: {names}")
    return mode


def _default_mode(shape: ModelShape, modes: tuple[FfnMode, ...]) -> FfnMode:
    loss = shape.perplexity_loss
    if FfnMode.PREDICTED in modes and loss is not None and loss <= MAX_PERPLEXITY_LOSS:
        return FfnMode.PREDICTED
    return FfnMode.EXACT if FfnMode.EXACT in modes else FfnMode.DENSE


def _why_not(shape: ModelShape, mode: FfnMode) -> str:
    name = mode.name.lower()
    if shape.activation is not Activation.RELU:
        return (
            f"FFN mode {name} needs a ReLU model; this file's activation is {shape.activation}, "
            "whose neurons are never exactly zero"
        )
    if not shape.sparse_layout:
        return f"FFN mode {name} needs ffn_down_t; this file stores the plain ffn_down"
    if shape.has_predictors:
        return (
            "FFN mode predicted needs trained predictors; this file's let every neuron through "
            f"(powerinfer.predictor.kind is {shape.predictor_kind})"
        )
    return "FFN mode predicted needs predictors; this file has none"


def _choose_context(shape: ModelShape, asked: int | None) -> int:
    if asked is None:
        return min(DEFAULT_CONTEXT, shape.n_ctx_train)
    if asked > shape.n_ctx_train:
        raise UsageError(
            f"a context of {asked} tokens is above the {shape.n_ctx_train} the model was trained for",
            hint=f"ask for at most {shape.n_ctx_train}, or 0 for all of it",
        )
    return _in_range("context", asked, 0, shape.n_ctx_train) or shape.n_ctx_train


def _choose_threads(options: PlanOptions, machine: Machine) -> int:
    if options.threads is None:
        return min(machine.n_cores, MAX_THREADS)
    if options.cpus is not None and options.threads > len(options.cpus):
        raise UsageError(
            f"{options.threads} threads do not fit on the {len(options.cpus)} processors named",
            hint="name more processors or fewer threads",
        )
    most = min(MAX_THREADS, THREADS_PER_CPU * machine.n_cpus)
    return _in_range("threads", options.threads, 1, most)


def _checked_threshold(asked: float | None, mode: FfnMode) -> float | None:
    if asked is None:
        return None
    if mode is not FfnMode.PREDICTED:
        raise UsageError(
            f"a sparse threshold has no effect in FFN mode {mode.name.lower()}",
            hint="use it with --ffn predicted",
        )
    if math.isnan(asked):
        raise UsageError(
            "the sparse threshold is not a number", hint="give a number, or inf or -inf"
        )
    return min(max(asked, -_FLOAT32_MAX), _FLOAT32_MAX)


def _checked_budget(asked: int | None) -> int | None:
    if asked is not None and asked <= 0:
        raise UsageError(
            f"a RAM budget of {asked} bytes is out of range", hint="give a positive size"
        )
    return asked


def _in_range(what: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise UsageError(f"{what} {value} is out of range", hint=f"give {low} to {high}")
    return value


def _by_name(what: str, name: str, known: dict[str, T]) -> T:
    if name not in known:
        raise UsageError(f"unknown {what} {name!r}", hint=f"known: {', '.join(known)}")
    return known[name]


def _units(shape: ModelShape) -> tuple[Unit, ...]:
    """Return everything that has a place, in the order of use, whatever the FFN mode needs of it."""
    units = [Unit(UnitKind.EMBEDDING, 0)]
    for layer in range(shape.n_layers):
        units += [Unit(UnitKind.ATTENTION, layer), Unit(UnitKind.KV, layer)]
        if shape.has_predictors:
            units.append(Unit(UnitKind.PREDICTOR, layer))
        units.append(Unit(UnitKind.NEURONS, layer, 0, shape.n_ff))
    return (*units, Unit(UnitKind.HEAD, 0))


def _tiers(mode: FfnMode, batch: int, predict_all: bool) -> tuple[Tier, ...]:
    if mode is not FfnMode.PREDICTED:
        return (Tier(batch, mode),)
    small = [n for n in PREDICTION_TIERS if n < batch]
    large = predict_all or batch <= PREDICTION_TIERS[-1]
    last = Tier(batch, FfnMode.PREDICTED if large else FfnMode.EXACT)
    return (*(Tier(n, FfnMode.PREDICTED) for n in small), last)


def check_memory(need: MemoryNeed, budget: int | None, machine: Machine) -> None:
    """Raise DoesNotFit for what exceeds the budget, or must be allocated and exceeds the available memory."""
    available = machine.available_bytes
    if budget is None and need.allocated_bytes > available:
        raise DoesNotFit(
            f"the KV cache ({format_bytes(need.kv_bytes)}) and scratch "
            f"({format_bytes(need.scratch_bytes)}) need {format_bytes(need.allocated_bytes)}, "
            f"{format_bytes(available)} of memory are available",
            hint="lower the context (-c) or the batch (-b), or use --kv-type f16",
        )
    if budget is not None and need.total_bytes > min(budget, available):
        limit = "the budget is" if budget <= available else "the memory available is"
        raise DoesNotFit(
            f"this run needs {_mebibytes(need.total_bytes)} of memory: weights "
            f"{format_bytes(need.weight_bytes + need.pinned_bytes)}, KV cache {format_bytes(need.kv_bytes)}, scratch "
            f"{format_bytes(need.scratch_bytes)}, program {format_bytes(need.program_bytes)}; "
            f"{limit} {format_bytes(min(budget, available))}",
            hint=f"with these settings --ram-budget {_mebibytes(need.total_bytes)} is the least; a smaller "
            "context (-c) or batch (-b) takes less",
        )


def _mebibytes(n_bytes: int) -> str:
    """Return a size as --ram-budget takes it, rounded up."""
    return f"{math.ceil(n_bytes / 2**20)}MiB"


def format_bytes(n_bytes: int) -> str:
    """Return a size with its binary unit: 1.5 GiB, 20 MiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.4g} {unit}"
    return f"{n_bytes} B"
