"""Which tensors an output file holds: name, shape, type, where the data comes from and in what order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.convert.elements import (
    PACKED,
    Array,
    RawTensor,
    to_float32,
)
from powerinfer_toolkit.convert.encoding import READ_ONLY
from powerinfer_toolkit.convert.importance import ImportanceMatrix
from powerinfer_toolkit.convert.neurons import NeuronPlaces
from powerinfer_toolkit.convert.outliers import bearing_type
from powerinfer_toolkit.convert.outtypes import OutType, fitting_type, recipe, wanted_type
from powerinfer_toolkit.convert.parameters import Parameter
from powerinfer_toolkit.convert.predictors import FC1, FC2
from powerinfer_toolkit.convert.source import PredictorWeights, Source
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import EXACT_PREDICTOR_RANK, Dialect, Tensor, TensorType
from powerinfer_toolkit.gguf_types import (
    WEIGHED,
    block_elements,
    is_packed,
    n_bytes,
    predictor_types,
)

_BLOCK_ELEMENTS = 1 << 20  # converted at a time: a few times 4 MiB of temporaries
FFN_TEMPLATES = (Tensor.FFN_GATE, Tensor.FFN_UP, Tensor.FFN_DOWN, Tensor.FFN_DOWN_T)


class Block(NamedTuple):
    """Rows of an output: their values [n, n_columns], and the source's bytes where those can be copied."""

    values: NDArray[np.float32]
    packed: Array | None


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the file; `shape` in numpy order, `read` gives the source tensor of type `source_type`.

    Output row r is row `rows[r]` of the source (of its transpose if `transposed`), its column c is column
    `columns[c]`; None keeps the order. `wanted` is the type that the rules give where its rows do not fit
    whole blocks. `importance` [n_columns] weighs errors. `never_zero` refuses a tensor of zeros.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    read: Callable[[], RawTensor]
    source_type: str = "F32"
    wanted: TensorType | None = None
    transposed: bool = False
    rows: Array | None = None
    columns: Array | None = None
    importance: NDArray[np.float32] | None = None
    never_zero: bool = False

    @property
    def n_bytes(self) -> int:
        """Size in the file, without padding."""
        return n_bytes(self.type, self.shape)

    @property
    def fell_back(self) -> bool:
        """Whether the rules want a type that these rows do not fit."""
        return self.wanted not in (None, self.type)

    @property
    def copied(self) -> bool:
        """Whether blocks go from source to output as they are."""
        keeps_blocks = not self.transposed and self.columns is None
        return self.source_type in PACKED and self.source_type == self.type.name and keeps_blocks

    @property
    def requantised(self) -> bool:
        """Whether values that were rounded to blocks once are rounded to others."""
        return self.source_type in PACKED and is_packed(self.type) and not self.copied

    def blocks(self) -> Iterator[Block]:
        """Read the source and yield the output's rows; a vector is one column."""
        raw = self.read()
        raw = _transposed(raw) if self.transposed else raw
        source = raw.data.reshape(raw.data.shape[0], -1)
        step = _row_step(self.shape)
        for begin in range(0, source.shape[0], step):
            span = slice(begin, begin + step)
            rows = source[span if self.rows is None else self.rows[span]]
            values = to_float32(rows, raw.dtype)
            if self.columns is not None:
                values = np.take(values, self.columns, axis=1)
            yield Block(values, np.ascontiguousarray(rows) if self.copied else None)


def _row_step(shape: tuple[int, ...]) -> int:
    """Return how many rows are converted at a time."""
    n_columns = shape[-1] if len(shape) > 1 else 1
    return max(1, _BLOCK_ELEMENTS // n_columns)


def _transposed(raw: RawTensor) -> RawTensor:
    """Return the transpose: a view, but for blocks, which become float32."""
    if raw.dtype not in PACKED:
        return RawTensor(raw.dtype, raw.data.T)
    n_rows, row_bytes = raw.data.shape
    tensor_type = PACKED[raw.dtype]
    n_columns = row_bytes // n_bytes(tensor_type, (block_elements(tensor_type),))
    n_columns *= block_elements(tensor_type)
    values = np.empty((n_columns, n_rows), np.float32)
    step = _row_step((n_rows, n_columns))
    for begin in range(0, n_rows, step):
        values[:, begin : begin + step] = to_float32(raw.data[begin : begin + step], raw.dtype).T
    return RawTensor("F32", values)


@dataclass(frozen=True)
class Layout:
    """Everything that decides the tensors of a file. `dialect` is None for a plain dense file.

    `outtype` None keeps the source's types. `sink_layers` are those that feed an attention sink.
    """

    source: Source
    outtype: OutType | None
    dialect: Dialect | None
    neurons: NeuronPlaces
    predictors: PredictorWeights | None
    importance: ImportanceMatrix | None = None
    sink_layers: frozenset[int] = frozenset()

    @property
    def keeps_predictors(self) -> bool:
        """Whether the file's predictors are those of the source."""
        return self.predictors is not None and self.predictors is self.source.predictors


def ffn_types(source: Source, outtype: OutType | None) -> set[TensorType]:
    """Return the types that gate, up and down are to take."""
    if outtype is not None:
        return set().union(*(recipe(outtype).types_of(template) for template in FFN_TEMPLATES))
    ffn = (part for part in source.parameters if part.template in FFN_TEMPLATES)
    return {TensorType[source.entries[parameter.name].dtype] for parameter in ffn}


def output_tensors(layout: Layout) -> list[OutputTensor]:
    """Return the tensors of the file in their order. Raises PiError where a type does not fit a shape."""
    source = layout.source
    tensors = [_converted(layout, parameter) for parameter in source.parameters]
    if source.config.tied_embeddings and layout.dialect is Dialect.UPSTREAM:
        embedding = next(tensor for tensor in tensors if tensor.name == Tensor.TOKEN_EMBD)
        tensors.append(replace(embedding, name=Tensor.OUTPUT))
    for layer in range(source.config.n_layers):
        tensors += _predictor(layout, layer)
    return tensors


def _converted(layout: Layout, parameter: Parameter) -> OutputTensor:
    """Return the output for one parameter of the source."""
    source, places = layout.source, layout.neurons.of_layer(parameter.layer)
    template, shape, transposed = parameter.template, parameter.shape, False
    rows, columns = source.row_order(parameter), None
    if template in (Tensor.FFN_GATE, Tensor.FFN_UP):
        rows = places
    elif template in (Tensor.FFN_DOWN, Tensor.FFN_DOWN_T):
        wanted = Tensor.FFN_DOWN if layout.dialect is None else Tensor.FFN_DOWN_T
        transposed = template != wanted
        template, shape = wanted, shape[::-1] if transposed else shape
        rows, columns = (None, places) if layout.dialect is None else (places, None)
    source_type = source.entries[parameter.name].dtype
    name = template.format(i=parameter.layer)
    tensor = OutputTensor(
        name,
        shape,
        TensorType.F32,
        partial(source.read, parameter.name),
        source_type,
        transposed=transposed,
        rows=rows,
        columns=columns,
    )
    return tensor if len(shape) == 1 else _typed(layout, tensor, template, parameter.layer)


def _typed(layout: Layout, tensor: OutputTensor, template: str, layer: int | None) -> OutputTensor:
    """Return a matrix with its type, and with what the importance matrix says of its columns."""
    if layout.outtype is None:
        wanted = TensorType[tensor.source_type]
    else:
        wanted = wanted_type(layout.outtype, layout.source.config, template, layer)
        wanted = bearing_type(template, layer, wanted, layout.sink_layers)
    chosen, _ = fitting_type(tensor.name, wanted, tensor.shape[-1])
    typed = replace(tensor, type=chosen, wanted=wanted)
    if chosen in READ_ONLY and not typed.copied:
        raise PiError(
            f"{tensor.name} is {chosen.name}, which can be copied but not written anew",
            hint="--outtype names a type to write",
        )
    if layout.importance is None or chosen not in WEIGHED:
        return typed
    importance = layout.importance.columns(tensor.name, tensor.shape[-1])
    if importance is not None and tensor.columns is not None:
        importance = importance[tensor.columns]
    return replace(typed, importance=importance)


def _predictor(layout: Layout, layer: int) -> list[OutputTensor]:
    """Return fc1 and fc2 of a layer: given, all zero for upstream's exact mode, or none."""
    config, predictors = layout.source.config, layout.predictors
    if predictors is None and layout.dialect is not Dialect.UPSTREAM:
        return []
    rank = EXACT_PREDICTOR_RANK if predictors is None else predictors.ranks[layer]
    tensors = []
    for part, template, shape in (
        (FC1, Tensor.PREDICTOR_FC1, (rank, config.n_embd)),
        (FC2, Tensor.PREDICTOR_FC2, (config.n_ff, rank)),
    ):
        name = template.format(i=layer)
        if predictors is None:
            zeros = partial(_zeros, shape)
            tensors.append(OutputTensor(name, shape, TensorType.F16, zeros, "F16"))
            continue
        source_type = predictors.entry(layer, part).dtype
        tensor = OutputTensor(
            name,
            shape,
            _predictor_type(layout, part, source_type, shape[1]),
            partial(predictors.read, layer, part),
            source_type,
            rows=_predictor_rows(layout, layer) if part == FC2 else None,
            never_zero=not predictors.exact_layers[layer],
        )
        tensors.append(tensor)
    return tensors


def _predictor_rows(layout: Layout, layer: int) -> Array | None:
    """Return the given row at every row of fc2: given ones are numbered as the checkpoint's neurons."""
    if layout.keeps_predictors:
        return layout.neurons.of_layer(layer)
    original = layout.neurons.original
    return None if original is None else original[layer]


def _predictor_type(layout: Layout, part: str, source_type: str, n_columns: int) -> TensorType:
    """Kept types, predictor_types() where whole blocks fit, else F16."""
    if layout.outtype is None and layout.keeps_predictors:
        return TensorType[source_type]
    fc1, fc2 = predictor_types(ffn_types(layout.source, layout.outtype))
    wanted = fc1 if part == FC1 else fc2
    return wanted if n_columns % block_elements(wanted) == 0 else TensorType.F16


def _zeros(shape: tuple[int, int]) -> RawTensor:
    return RawTensor("F16", np.zeros(shape, np.float16))
