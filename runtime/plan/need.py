"""What a plan takes of the memory of a GPU and of the host.

The sizes counted here are those that runtime/native/src/gpu/stream.cpp and forward.cpp allocate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime.plan.device import Device
from powerinfer_toolkit.runtime.plan.plan import (
    PAGE_TOKENS,
    FfnMode,
    LayerPlace,
    Placement,
    Plan,
    Side,
    Unit,
    UnitKind,
    layer_places,
)
from powerinfer_toolkit.runtime.plan.shape import ModelShape

# Measured: pi-run with a vocabulary of 300 and of 49,152 tokens; packed tiles and the stack of a thread.
PROGRAM_BYTES = 48 * 2**20
TOKENIZER_BYTES = 512  # for each token of the vocabulary
THREAD_BYTES = 2**20
DRIVER_BYTES = 384 * 2**20  # an upper estimate of what a GPU's driver takes of the host's memory
TILE_BYTES = 56 * 2**20  # that the device library dequantises at a time
ROUNDING_BYTES = 16 * 2**20  # of allocations to pages of the device
GRAPH_BYTES = 32 * 2**20  # kept for recorded steps
LOGIT_ROWS = 64  # rows of the head computed at a time
MAX_TOP = 256  # largest logits that are found of a row
TOP_LOGITS, TOP_ROWS = 2048, 16  # of a list of them, and of rows that have lists at a time
PREDICTED_TOGETHER = 16  # tokens that the predictor runs for at a time


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
class MemoryNeed:
    """Bytes that a run takes of the host's memory; scratch and program are upper estimates."""

    weight_bytes: int  # of the mapped file, those that are used from there
    pinned_bytes: int  # weights that the GPU pulls
    kv_bytes: int
    scratch_bytes: int
    program_bytes: int  # interpreter, libraries, driver and tokenizer

    @property
    def allocated_bytes(self) -> int:
        """What is no part of the file: KV cache, scratch and pinned weights."""
        return self.kv_bytes + self.scratch_bytes + self.pinned_bytes

    @property
    def total_bytes(self) -> int:
        """Everything."""
        return self.weight_bytes + self.allocated_bytes + self.program_bytes


def kv_token_bytes(shape: ModelShape, plan: Plan) -> int:
    """Return what the KV cache holds of one token."""
    element_bytes = 4 if plan.kv_type is TensorType.F32 else 2
    return 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim * element_bytes


def layer_kv_bytes(shape: ModelShape, plan: Plan) -> int:
    """Return what the KV cache of one layer takes."""
    return plan.n_kv_pages * PAGE_TOKENS * kv_token_bytes(shape, plan) // shape.n_layers


def uses_predictor(plan: Plan, place: LayerPlace) -> bool:
    """Return whether the predictor of a layer there is ever run."""
    if plan.ffn_mode is not FfnMode.PREDICTED:
        return False
    return place.side is Side.SPLIT or not plan.predict_split_only


def gpu_need(shape: ModelShape, plan: Plan, units: tuple[Unit, ...], device: Device) -> GpuNeed:
    """Return what these units take on the device under the plan's sizes."""
    parts = shape.parts
    places = [p for p in layer_places(units, shape.n_layers) if p.side is not Side.CPU]
    weights = sum(layer_weight_bytes(shape, plan, place) for place in places)
    embedding, head = (is_on_gpu(units, kind) for kind in (UnitKind.EMBEDDING, UnitKind.HEAD))
    if head:
        norm = 256 * math.ceil(shape.n_embd / 64)
        weights += norm + (parts.device_head or parts.device_embedding)
    if embedding and not (head and parts.head == 0):
        weights += parts.device_embedding
    return GpuNeed(
        device.context_bytes,
        weights,
        layer_kv_bytes(shape, plan) * len(places),
        _working_bytes(shape, plan, device),
    )


def layer_weight_bytes(shape: ModelShape, plan: Plan, place: LayerPlace) -> int:
    """Return what a layer's weights take on the device."""
    size = shape.parts.layers[place.layer]
    predictor = size.device_predictor if uses_predictor(plan, place) else 0
    return size.device_attention + predictor + size.device_neurons(place.n_hot)


def is_on_gpu(units: Iterable[Unit], kind: UnitKind) -> bool:
    """Return whether a part of the model, no layer's, is on the GPU."""
    return any(u.kind is kind and u.placement is Placement.GPU for u in units)


def _working_bytes(shape: ModelShape, plan: Plan, device: Device) -> int:
    n, n_q = plan.max_batch_tokens, shape.n_heads * shape.head_dim
    n_kv, rank = shape.n_kv_heads * shape.head_dim, shape.parts.predictor_rank
    row = 3 * shape.n_embd + 2 * n_q + 2 * n_kv + shape.n_rot
    pulled = n * shape.n_embd  # the share of pulled neurons, where there are any
    floats = n * row + min(n, LOGIT_ROWS) * (shape.n_vocab + 2 * MAX_TOP + 1) + pulled
    predicted = min(n, PREDICTED_TOGETHER) * (shape.n_ff + rank)
    words = n * math.ceil(shape.n_ff / 64)
    lists = 2 * n * shape.n_ff + predicted + 2 * n + 4 * words
    pages = math.ceil(plan.n_context / PAGE_TOKENS)
    step = 8 * n + min(n, plan.n_sequences) * pages + 2 * n * math.ceil(n / 64)
    spans = math.ceil(4 * device.n_processors / shape.n_kv_heads)
    attention = (n + spans) * shape.n_heads * (shape.head_dim + 2)
    sums = (2 * device.n_processors + shape.n_embd // 1024 + 1) * 1024
    tops = min(n, TOP_ROWS) * math.ceil(shape.n_vocab / TOP_LOGITS) * 2 * (MAX_TOP + 1)
    longest = max(shape.n_ff, shape.n_embd, n_q) + 32
    halves = n * (2 * longest + 4)
    tile = TILE_BYTES + 64 * longest
    pieces = 2 * plan.stream_piece_bytes  # of streamed weights, as they come and taken apart
    return (
        4 * (floats + lists + step + max(attention, sums, tops))
        + halves
        + tile
        + pieces
        + GRAPH_BYTES
        + ROUNDING_BYTES
    )


def memory_need(shape: ModelShape, plan: Plan) -> MemoryNeed:
    """Return what the plan takes of the host's memory; scratch as if every token's logits were wanted."""
    n_heads = shape.n_heads + 2 * shape.n_kv_heads
    row = 4 * shape.n_embd + 2 * n_heads * shape.head_dim + 4 * shape.n_ff + shape.n_vocab
    places = layer_places(plan.units, shape.n_layers)
    n_cpu = sum(place.side is Side.CPU for place in places)
    driver = DRIVER_BYTES if plan.uses_gpu else 0
    split = any(place.side is Side.SPLIT for place in places)
    handed = _handed_words(shape) if split else 0
    return MemoryNeed(
        weight_bytes=_mapped_bytes(shape, plan, places),
        pinned_bytes=sum(pinned_bytes(shape, place) for place in places),
        kv_bytes=layer_kv_bytes(shape, plan) * n_cpu,
        scratch_bytes=4 * (row + handed) * plan.max_batch_tokens
        + THREAD_BYTES * plan.n_threads
        + 2 * plan.stream_piece_bytes,
        program_bytes=PROGRAM_BYTES + TOKENIZER_BYTES * shape.n_vocab + driver,
    )


def _handed_words(shape: ModelShape) -> int:
    """Return the 32-bit words of a token that the sides of split layers hand each other: as packets, and unpacked."""
    mask = 2 * math.ceil(shape.n_ff / 64)
    packets = 2 * math.ceil(shape.n_embd / 6) + math.ceil(mask / 3)
    return 2 * shape.n_embd + mask + 4 * packets


def pinned_bytes(shape: ModelShape, place: LayerPlace) -> int:
    """Return what the pulled neurons of a layer take, as the device has them."""
    n = place.n_pull - place.n_hot
    return shape.parts.layers[place.layer].device_neurons(n) if n else 0


def _mapped_bytes(shape: ModelShape, plan: Plan, places: list[LayerPlace]) -> int:
    """Return the bytes of the file that are read from the host's memory while a model runs."""
    if not plan.uses_gpu:
        return shape.weight_bytes - (0 if plan.predicted_tokens else shape.predictor_bytes)
    parts = shape.parts
    embedding, head = (is_on_gpu(plan.units, kind) for kind in (UnitKind.EMBEDDING, UnitKind.HEAD))
    # A tied head on the GPU leaves the rows of the embedding, which are read one by one, where they are.
    once = (0 if embedding else parts.embedding) + (0 if head else parts.head + parts.output_norm)
    return once + sum(_layer_mapped_bytes(shape, plan, place) for place in places)


def _layer_mapped_bytes(shape: ModelShape, plan: Plan, place: LayerPlace) -> int:
    size = shape.parts.layers[place.layer]
    cold = size.mapped_neurons(shape.n_ff - place.n_pull, shape.n_ff)
    attention = size.attention if place.side is Side.CPU else 0
    predictor = size.predictor if place.side is Side.CPU and uses_predictor(plan, place) else 0
    return attention + predictor + cold
