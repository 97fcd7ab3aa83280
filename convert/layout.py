"""Which tensors an output file holds: name, shape, type, where the data comes from and in what order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.convert.checkpoint import Checkpoint
from powerinfer_toolkit.convert.config import ModelConfig, RopeKind
from powerinfer_toolkit.convert.elements import (
    Array,
    RawTensor,
    block_elements,
    check_block,
    n_bytes,
    to_float32,
)
from powerinfer_toolkit.convert.parameters import Parameter
from powerinfer_toolkit.convert.predictors import FC1, FC2, Predictors
from powerinfer_toolkit.convert.rope import interleaved_rows, llama3_factors
from powerinfer_toolkit.gguf_format import (
    EXACT_PREDICTOR_RANK,
    Activation,
    Dialect,
    Tensor,
    TensorType,
)

_BLOCK_ELEMENTS = 1 << 20  # converted at a time: a few times 4 MiB of temporaries
_QUANTISED = (TensorType.Q8_0, TensorType.Q4_0)
_EMBEDDINGS = (Tensor.TOKEN_EMBD, Tensor.OUTPUT)


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the file; `shape` in numpy order, `read` gives the source tensor.

    Output row r is row `rows[r]` of the source (of its transpose if `transposed`), its column c is column
    `columns[c]`; None keeps the order. `never_zero` refuses a tensor of zeros.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    read: Callable[[], RawTensor]
    transposed: bool = False
    rows: Array | None = None
    columns: Array | None = None
    never_zero: bool = False

    @property
    def n_bytes(self) -> int:
        """Size in the file, without padding."""
        return n_bytes(self.type, self.shape)

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        """Read the source and yield the output's rows as float32 [n, n_columns]; a vector is one column."""
        raw = self.read()
        source = raw.data.reshape(raw.data.shape[0], -1)
        source = source.T if self.transposed else source
        step = max(1, _BLOCK_ELEMENTS // source.shape[1])
        for begin in range(0, source.shape[0], step):
            chosen = (
                slice(begin, begin + step) if self.rows is None else self.rows[begin : begin + step]
            )
            block = source[chosen] if self.columns is None else source[chosen][:, self.columns]
            yield to_float32(block, raw.dtype)


@dataclass(frozen=True)
class Layout:
    """Everything that decides the tensors of a file. `dialect` is None for a plain dense file.

    `order` [n_layers, n_ff] is the original neuron at every place, None for the checkpoint's own order.
    """

    config: ModelConfig
    outtype: TensorType
    dialect: Dialect | None
    order: NDArray[np.int32] | None
    predictors: Predictors | None


def output_tensors(
    layout: Layout, checkpoint: Checkpoint, parameters: list[Parameter]
) -> list[OutputTensor]:
    """Return the tensors of the file in their order. Raises PiError where a type does not fit a shape."""
    tensors = [_converted(layout, checkpoint, parameter) for parameter in parameters]
    config = layout.config
    if config.tied_embeddings and layout.dialect is Dialect.UPSTREAM:
        embedding = next(tensor for tensor in tensors if tensor.name == Tensor.TOKEN_EMBD)
        tensors.append(OutputTensor(Tensor.OUTPUT, embedding.shape, embedding.type, embedding.read))
    if config.rope.kind is RopeKind.LLAMA3:
        factors = llama3_factors(config.rope, config.head_dim)
        tensors.append(
            OutputTensor(
                Tensor.ROPE_FREQS, factors.shape, TensorType.F32, lambda: RawTensor("F32", factors)
            )
        )
    for layer in range(config.n_layers):
        tensors += _predictor(layout, layer)
    return tensors


def _converted(layout: Layout, checkpoint: Checkpoint, parameter: Parameter) -> OutputTensor:
    """Return the output for one parameter of the checkpoint."""
    config, template = layout.config, parameter.template
    read = partial(checkpoint.read, parameter.hf_name)
    order = (
        None if layout.order is None or parameter.layer is None else layout.order[parameter.layer]
    )
    rows = columns = None
    shape, transposed = parameter.shape, False
    if template in config.arch.rope_permuted:
        rows = interleaved_rows(parameter.shape[0] // config.head_dim, config.head_dim)
    elif template in (Tensor.FFN_GATE, Tensor.FFN_UP):
        rows = order
    elif template == Tensor.FFN_DOWN and config.activation is Activation.RELU:
        template, shape, transposed, rows = Tensor.FFN_DOWN_T, shape[::-1], True, order
    elif template == Tensor.FFN_DOWN:
        columns = order
    name = template.format(i=parameter.layer)
    tensor_type = _matrix_type(layout.outtype, template) if len(shape) > 1 else TensorType.F32
    check_block(name, tensor_type, shape[-1])
    return OutputTensor(name, shape, tensor_type, read, transposed, rows, columns)


def _matrix_type(outtype: TensorType, template: str) -> TensorType:
    """Q4_0 files keep the embeddings in Q8_0: they matter most and are read one row at a time."""
    if outtype is TensorType.Q4_0 and template in _EMBEDDINGS:
        return TensorType.Q8_0
    return outtype


def _predictor(layout: Layout, layer: int) -> list[OutputTensor]:
    """Return fc1 and fc2 of a layer: given, all zero for upstream's exact mode, or none."""
    config, predictors = layout.config, layout.predictors
    if predictors is not None:
        rank = predictors.ranks[layer]
        read_fc1, read_fc2 = (partial(predictors.read, layer, name) for name in (FC1, FC2))
    elif layout.dialect is Dialect.UPSTREAM:
        rank = EXACT_PREDICTOR_RANK
        read_fc1, read_fc2 = (
            partial(_zeros, rank, config.n_embd),
            partial(_zeros, config.n_ff, rank),
        )
    else:
        return []
    shapes = (rank, config.n_embd), (config.n_ff, rank)
    outtype = layout.outtype if predictors is not None else TensorType.F16
    fc1_type, fc2_type = (_predictor_type(outtype, shape[1]) for shape in shapes)
    fc1, fc2 = (name.format(i=layer) for name in (Tensor.PREDICTOR_FC1, Tensor.PREDICTOR_FC2))
    order = layout.order[layer] if layout.order is not None else None
    given = predictors is not None
    return [
        OutputTensor(fc1, shapes[0], fc1_type, read_fc1, never_zero=given),
        OutputTensor(fc2, shapes[1], fc2_type, read_fc2, rows=order, never_zero=given),
    ]


def _predictor_type(outtype: TensorType, n_columns: int) -> TensorType:
    """Q8_0 in quantised files where whole blocks fit, else F16."""
    if outtype in _QUANTISED and n_columns % block_elements(TensorType.Q8_0) == 0:
        return TensorType.Q8_0
    return TensorType.F16


def _zeros(n_rows: int, n_columns: int) -> RawTensor:
    return RawTensor("F16", np.zeros((n_rows, n_columns), np.float16))
