"""From which step size on the CPU's neurons of split layers are computed on the GPU (docs/hybrid.md, docs/plan.md).

Their weights are then read once for all tokens of a step and pass through the GPU, instead of being multiplied where
they are, which takes the CPU longer with every token.
"""

from __future__ import annotations

import dataclasses
import math

from powerinfer_toolkit.runtime.plan.plan import Plan, Side, layer_places
from powerinfer_toolkit.runtime.plan.profile import MachineProfile
from powerinfer_toolkit.runtime.plan.shape import ModelShape

PIECE_BYTES = 16 * 2**20  # that pass through at a time: 0.3 ms of a PCIe 5 bus
LEAST_TOKENS = 17  # smaller steps are the CPU's: what sides hand over is made for them
# What a core computes at most, multiplications and additions: upper estimates, so that the CPU keeps what it may be
# faster at.
_FLOAT_OPERATIONS_PER_SECOND = 1e11
_INT8_OPERATIONS_PER_SECOND = 2.5e11  # against weights of a byte and less
_INT8_BYTES = 1.5  # of a weight, below which it is quantised


def with_streaming(shape: ModelShape, plan: Plan, profile: MachineProfile) -> Plan:
    """Return the plan with the least step that streaming is faster for; as it is where no step is.

    A step of n tokens multiplies n times with every weight, at `_OPERATIONS_PER_SECOND` of every thread; streaming
    copies all of them, on the host at half the rate of reading, to the GPU at the rate of pulling.
    """
    rate = min(profile.pull_bytes_per_second, profile.cpu_beside_bytes_per_second / 2)
    if rate <= 0 or not _has_rows(shape):
        return plan
    n_weights = 3 * shape.n_embd * shape.n_ff * shape.n_layers
    weight_bytes = sum(size.gate + size.up_down for size in shape.parts.layers) / n_weights
    quantised = weight_bytes < _INT8_BYTES
    each = _INT8_OPERATIONS_PER_SECOND if quantised else _FLOAT_OPERATIONS_PER_SECOND
    token_seconds = 2 / (each * plan.n_threads)  # of a weight
    n_tokens = max(LEAST_TOKENS, math.ceil(weight_bytes / rate / token_seconds))
    if n_tokens > plan.max_batch_tokens:
        return plan
    return dataclasses.replace(plan, stream_tokens=n_tokens, stream_piece_bytes=PIECE_BYTES)


def without_streaming(plan: Plan) -> Plan:
    """Return the plan with steps of any size computed where the weights are."""
    return dataclasses.replace(plan, stream_tokens=0, stream_piece_bytes=0)


def has_cold_neurons(shape: ModelShape, plan: Plan) -> bool:
    """Return whether the CPU computes neurons of a split layer."""
    places = layer_places(plan.units, shape.n_layers)
    return any(place.side is Side.SPLIT and place.n_pull < shape.n_ff for place in places)


def _has_rows(shape: ModelShape) -> bool:
    """Return whether the GPU takes the last columns of a plain ffn_down: multiples of 32."""
    return shape.n_ff % 32 == 0 or all(size.device_columns is None for size in shape.parts.layers)
