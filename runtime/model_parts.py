"""What a model file's tensors and keys tell the planner: sizes of the parts, and how often neurons fire."""

from __future__ import annotations

import ctypes as ct
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import COVERAGE_POINTS, Key, NeuronOrder, Tensor
from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.plan.shape import (
    Columns,
    Firing,
    LayerBytes,
    ModelBytes,
    round_up,
)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the file; `shape` is in GGUF order, the contiguous dimension first."""

    name: str
    type: int  # GGUF tensor type id
    shape: tuple[int, ...]
    n_bytes: int

    @property
    def n_rows(self) -> int:
        """Its rows; 1 for a vector."""
        return math.prod(self.shape[1:])

    @property
    def device_stride(self) -> int:
        """Bytes from one row to the next on a GPU."""
        return round_up(self.n_bytes // self.n_rows, 16)

    @property
    def device_bytes(self) -> int:
        """What it takes on a GPU."""
        return round_up(self.n_rows * self.device_stride, 256)


def _suffix(template: str) -> str:
    return template.removeprefix("blk.{i}.")


_GATE, _UP = _suffix(Tensor.FFN_GATE), _suffix(Tensor.FFN_UP)
_DOWN, _DOWN_T = _suffix(Tensor.FFN_DOWN), _suffix(Tensor.FFN_DOWN_T)
_FC1, _FC2 = _suffix(Tensor.PREDICTOR_FC1), _suffix(Tensor.PREDICTOR_FC2)


def model_bytes(tensors: Iterable[TensorEntry], n_layers: int) -> ModelBytes:
    """Add up the tensors of a file."""
    layers: list[dict[str, TensorEntry]] = [{} for _ in range(n_layers)]
    others: dict[str, TensorEntry] = {}
    for tensor in tensors:
        layer = re.fullmatch(r"blk\.(\d+)\.(.*)", tensor.name)
        if layer is None:
            others[tensor.name] = tensor
        elif int(layer[1]) < n_layers:
            layers[int(layer[1])][layer[2]] = tensor
    embedding, head = others.get(Tensor.TOKEN_EMBD), others.get(Tensor.OUTPUT)
    norm = others.get(Tensor.OUTPUT_NORM)
    return ModelBytes(
        layers=tuple(map(_layer_bytes, layers)),
        embedding=embedding.n_bytes if embedding else 0,
        head=head.n_bytes if head else 0,
        output_norm=norm.n_bytes if norm else 0,
        device_embedding=embedding.device_bytes if embedding else 0,
        device_head=head.device_bytes if head else 0,
        predictor_rank=max((_padded_rank(t[_FC1].n_rows) for t in layers if _FC1 in t), default=0),
    )


def _layer_bytes(tensors: dict[str, TensorEntry]) -> LayerBytes:
    predictor = [tensors[name] for name in (_FC1, _FC2) if name in tensors]
    rows = [tensors[name] for name in (_GATE, _UP, _DOWN_T) if name in tensors]
    down = tensors.get(_DOWN)
    ffn = {tensor.name for tensor in (*predictor, *rows, *((down,) if down else ()))}
    attention = [tensor for tensor in tensors.values() if tensor.name not in ffn]
    return LayerBytes(
        attention=sum(tensor.n_bytes for tensor in attention),
        gate=sum(tensor.n_bytes for tensor in rows[:1]),
        up_down=sum(tensor.n_bytes for tensor in rows[1:]) + (down.n_bytes if down else 0),
        predictor=sum(tensor.n_bytes for tensor in predictor),
        device_attention=sum(tensor.device_bytes for tensor in attention),
        device_predictor=_device_predictor(*predictor) if predictor else 0,
        device_rows=tuple(tensor.device_stride for tensor in rows),
        device_columns=Columns(down.n_rows, *_type_layout(down.type)) if down else None,
    )


def _padded_rank(rank: int) -> int:
    return round_up(rank, 32)


def _device_predictor(fc1: TensorEntry, fc2: TensorEntry) -> int:
    """Return what a predictor takes on a GPU, whose rows have multiples of 32 elements."""
    rank = fc1.n_rows
    padded = _padded_rank(rank)
    fc2_stride = round_up(fc2.n_bytes // fc2.n_rows * padded // rank, 16)
    return round_up(padded * fc1.device_stride, 256) + round_up(fc2.n_rows * fc2_stride, 256)


def _type_layout(kind: int) -> tuple[int, int]:
    """Return elements and bytes of a block of a tensor type."""
    elements, n_bytes = ct.c_uint32(), ct.c_uint32()
    native_lib.load().pi_type_layout(kind, ct.byref(elements), ct.byref(n_bytes))
    return elements.value, n_bytes.value


def read_firing(metadata: Callable[[str], Any], n_layers: int) -> tuple[Firing, ...]:
    """Return how often the neurons of each layer fire, () where the file does not say.

    PiError for lists of another length. A curve is about the hottest neurons; it says where they are only in a
    file that is sorted by it.
    """
    densities = metadata(Key.STATISTICS_DENSITY)
    if densities is None:
        return ()
    coverage = metadata(Key.STATISTICS_COVERAGE) or []
    points = COVERAGE_POINTS if coverage else 0
    if len(densities) != n_layers or len(coverage) != n_layers * points:
        raise PiError(
            f"{Key.STATISTICS_DENSITY} or {Key.STATISTICS_COVERAGE} does not have one entry for each layer",
            hint="the file is damaged: convert or download it again",
        )
    if metadata(Key.NEURON_ORDER) != NeuronOrder.HOT_FIRST:
        points = 0
    return tuple(
        Firing(density, tuple(coverage[i * points : (i + 1) * points]))
        for i, density in enumerate(densities)
    )
