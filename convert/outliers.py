"""Matrices that no type of blocks bears: those that write an attention sink into the residual stream or read it.

A few neurons of such a layer fire hundreds of times as strongly as others, at the first position, and have single
weights far above the rest. In ffn_down_t a neuron's weights share blocks, so one of them sets the step that its
31 neighbours are rounded with, and the neuron's activation multiplies that error into everything later
(docs/LOG.md has the figures). Such a weight shows without running the model. Every later token attends to the
sink, whose value is close to zero by weights that cancel: attn_v has to keep more bits too, in all layers.
"""

from __future__ import annotations

import math

from powerinfer_toolkit.convert.elements import to_float32
from powerinfer_toolkit.convert.parameters import Parameter
from powerinfer_toolkit.convert.source import Source
from powerinfer_toolkit.gguf_format import Tensor, TensorType
from powerinfer_toolkit.gguf_types import is_packed

OUTLIER_RATIO = (
    20.0  # of a weight to the matrix's root mean square; a normal distribution has none above 6
)

_ROWS = 256  # in float32 at a time


def sink_layers(source: Source, ratio: float) -> frozenset[int]:
    """Return the layers whose down matrix has a weight of `ratio` times its root mean square; reads them all."""
    down = [p for p in source.parameters if p.template in (Tensor.FFN_DOWN, Tensor.FFN_DOWN_T)]
    return frozenset(p.layer for p in down if p.layer is not None and _peak(source, p) >= ratio)


def bearing_type(
    template: str, layer: int | None, wanted: TensorType, sinks: frozenset[int]
) -> TensorType:
    """Return the type that a matrix takes in a model whose layers `sinks` feed an attention sink."""
    if not sinks or not is_packed(wanted):
        return wanted
    if template == Tensor.FFN_DOWN_T and layer in sinks:
        return TensorType.F16
    if template == Tensor.ATTN_V:
        return TensorType.F16 if wanted == TensorType.Q8_0 else TensorType.Q8_0
    return wanted


def _peak(source: Source, parameter: Parameter) -> float:
    """Return the largest magnitude over the root mean square; 0 for a matrix of zeros."""
    raw = source.read(parameter.name)
    largest, squares = 0.0, 0.0
    for begin in range(0, len(raw.data), _ROWS):
        values = to_float32(raw.data[begin : begin + _ROWS], raw.dtype)
        largest = max(largest, float(abs(values).max()))
        squares += float((values.astype("f8") ** 2).sum())
    mean = squares / math.prod(parameter.shape)
    return largest / math.sqrt(mean) if 0 < mean < math.inf else 0.0
