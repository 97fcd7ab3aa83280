"""The plan: which unit is used from where, what runs at which step size, and the sizes of all state.

Python plans, the native engine executes; a CPU-only run executes a plan too.
"""

from __future__ import annotations

import ctypes as ct
import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime import native_lib

SCHEMA = 1
PAGE_TOKENS = 32  # positions in one page of the KV cache


class UnitKind(IntEnum):
    """Pieces of a layer, or of the model (layer 0), that live in one place: PI_UNIT_*."""

    EMBEDDING = 0
    ATTENTION = 1
    KV = 2
    PREDICTOR = 3
    NEURONS = 4
    HEAD = 5


class Placement(IntEnum):
    """Where a unit's weights are used from: PI_PLACE_*."""

    CPU = 0
    GPU = 1
    STREAM = 2
    PULL = 3


class FfnMode(IntEnum):
    """How FFN neurons are chosen: all, those whose gate is open, those a predictor names."""

    DENSE = 0
    EXACT = 1
    PREDICTED = 2


class HandOver(IntEnum):
    """How the sides of a split layer wait for each other: PI_HANDOVER_*."""

    AUTO = 0
    SPIN = 1
    WAIT_VALUE = 2
    EVENT = 3


@dataclass(frozen=True)
class Unit:
    """One placed piece; `begin` and `end` delimit the neurons of NEURONS units and are 0 elsewhere."""

    kind: UnitKind
    layer: int
    begin: int = 0
    end: int = 0
    placement: Placement = Placement.CPU


class Side(StrEnum):
    """Where a layer is computed."""

    CPU = "CPU"
    GPU = "GPU"
    SPLIT = "split"


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer and its neurons are: [0, n_hot) on the GPU, [n_hot, n_pull) pulled, the others on the CPU."""

    layer: int
    side: Side
    n_hot: int
    n_pull: int


@dataclass(frozen=True)
class Tier:
    """The FFN mode of steps with at most `max_tokens` new tokens (and more than the tier before)."""

    max_tokens: int
    ffn_mode: FfnMode


@dataclass(frozen=True)
class Plan:
    """What an engine is created from; `tiers` ascend and the last one covers `max_batch_tokens`."""

    units: tuple[Unit, ...]
    tiers: tuple[Tier, ...]
    n_threads: int
    max_batch_tokens: int
    n_sequences: int
    n_context: int  # most tokens in one sequence
    n_kv_pages: int  # of PAGE_TOKENS tokens, shared by all sequences
    kv_type: TensorType
    activation_type: TensorType
    predict_all: bool = False
    sparse_threshold: float | None = None  # None: the file's
    isa: str | None = None  # None: $PI_ISA, else the best one
    ram_budget_bytes: int | None = None  # what the plan was held against; None: available memory
    vram_budget_bytes: int = 0  # ceiling of everything on the GPU; 0: none is used
    cpus: tuple[int, ...] | None = None  # logical processors of the threads; None: all there are
    predict_split_only: bool = False  # predicted tiers hold for split layers, the others are exact
    handover: HandOver = HandOver.AUTO
    # Steps of at least so many tokens compute the CPU's neurons of split layers on the GPU, which their weights
    # pass through in pieces; 0: none
    stream_tokens: int = 0
    stream_piece_bytes: int = 0

    @property
    def ffn_mode(self) -> FfnMode:
        """The mode of single-token steps, which names the run."""
        return self.tiers[0].ffn_mode

    @property
    def predicted_tokens(self) -> int:
        """Most new tokens of a step that predictors mask; 0 without prediction."""
        predicted = [t.max_tokens for t in self.tiers if t.ffn_mode is FfnMode.PREDICTED]
        return max(predicted, default=0)

    @property
    def uses_gpu(self) -> bool:
        """Whether anything is on the GPU."""
        return any(unit.placement is Placement.GPU for unit in self.units)

    def to_json(self) -> str:
        """Return the plan as JSON: enums by lower-case name, with a schema number."""
        document = {"schema": SCHEMA, **dataclasses.asdict(self)}
        return json.dumps(_plain(document), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what to_json wrote; PiError when the text is no plan of this schema."""
        try:
            document = json.loads(text)
            document.pop("expected", None)  # what a dry run adds
            schema = document.pop("schema")
            if schema != SCHEMA:
                raise ValueError(f"its schema is {schema}, this version writes {SCHEMA}")
            return cls(**_parse(document))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as failure:
            raise PiError(
                f"not a plan: {failure}", hint="write one with pi-run --dry-run --json"
            ) from failure

    def to_native(self) -> native_lib.Plan:
        """Return the C struct; it keeps its arrays alive."""
        units = (native_lib.Unit * len(self.units))(
            *(native_lib.Unit(u.kind, u.layer, u.begin, u.end, u.placement) for u in self.units)
        )
        tiers = (native_lib.Tier * len(self.tiers))(
            *(native_lib.Tier(t.max_tokens, t.ffn_mode) for t in self.tiers)
        )
        return native_lib.Plan(
            n_units=len(units),
            units=ct.cast(units, ct.POINTER(native_lib.Unit)),
            tiers=ct.cast(tiers, ct.POINTER(native_lib.Tier)),
            n_tiers=len(tiers),
            n_threads=self.n_threads,
            max_batch_tokens=self.max_batch_tokens,
            n_sequences=self.n_sequences,
            n_context=self.n_context,
            n_kv_pages=self.n_kv_pages,
            kv_type=self.kv_type,
            activation_type=self.activation_type,
            predict_all=self.predict_all,
            sparse_threshold=math.nan if self.sparse_threshold is None else self.sparse_threshold,
            isa=self.isa.encode() if self.isa else None,
            vram_budget_bytes=self.vram_budget_bytes,
            predict_split_only=self.predict_split_only,
            handover=self.handover,
            stream_tokens=self.stream_tokens,
            stream_piece_bytes=self.stream_piece_bytes,
        )


def layer_places(units: Iterable[Unit], n_layers: int) -> list[LayerPlace]:
    """Return where units put each layer."""
    attention = [Placement.CPU] * n_layers
    n_hot, n_pull, n_all = [0] * n_layers, [0] * n_layers, [0] * n_layers
    for unit in units:
        if unit.kind is UnitKind.ATTENTION:
            attention[unit.layer] = unit.placement
        elif unit.kind is UnitKind.NEURONS:
            n_all[unit.layer] = unit.end
            if unit.placement is not Placement.CPU:
                n_pull[unit.layer] = unit.end
            if unit.placement is Placement.GPU:
                n_hot[unit.layer] = unit.end
    places = []
    for layer in range(n_layers):
        on_gpu = Side.GPU if n_hot[layer] == n_all[layer] else Side.SPLIT
        side = Side.CPU if attention[layer] is Placement.CPU else on_gpu
        places.append(LayerPlace(layer, side, n_hot[layer], n_pull[layer]))
    return places


def _plain(value: object) -> object:
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _parse(document: dict[str, Any]) -> dict[str, Any]:
    units = tuple(
        Unit(
            **{
                **unit,
                "kind": UnitKind[unit["kind"].upper()],
                "placement": Placement[unit["placement"].upper()],
            }
        )
        for unit in document["units"]
    )
    tiers = tuple(
        Tier(tier["max_tokens"], FfnMode[tier["ffn_mode"].upper()]) for tier in document["tiers"]
    )
    types = {key: TensorType[document[key].upper()] for key in ("kv_type", "activation_type")}
    cpus = document.get("cpus")
    others = {
        "cpus": None if cpus is None else tuple(cpus),
        "handover": HandOver[document.get("handover", "auto").upper()],
    }
    return {**document, "units": units, "tiers": tiers, **types, **others}
