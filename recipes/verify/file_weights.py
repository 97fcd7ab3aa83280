"""The weights of a model file under the checkpoint's names, in its conventions, as float32."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.convert.config import ModelConfig, read_config
from powerinfer_toolkit.convert.elements import to_float32
from powerinfer_toolkit.convert.gguf_source import GgufSource
from powerinfer_toolkit.convert.layout import FFN_TEMPLATES
from powerinfer_toolkit.convert.parameters import Parameter
from powerinfer_toolkit.convert.predictors import FC1, FC2, Predictors
from powerinfer_toolkit.convert.roles import WEIGHTS
from powerinfer_toolkit.convert.rope import interleaved_rows
from powerinfer_toolkit.convert.source import PredictorWeights
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Activation, NeuronOrder, Tensor

Values = NDArray[np.float32]
_SIZES = ("n_layers", "n_embd", "n_ff", "n_heads", "n_kv_heads", "head_dim", "activation")


@dataclass(frozen=True)
class PredictorMatrices:
    """fc1 [rank, n_embd] and fc2 [n_ff, rank] of every layer, None where it stays exact."""

    threshold: float
    layers: list[tuple[Values, Values] | None]


class FileWeights:
    """A model file, read one tensor at a time.

    Neurons stay in the file's order where the sidecar with their original numbers is missing; the function is the
    same, since predictors are in that order too.
    """

    def __init__(self, path: Path) -> None:
        """Open it. Raises PiError."""
        self.source = GgufSource(path)
        self.config: ModelConfig = self.source.config

    @property
    def is_sparse(self) -> bool:
        """Whether the activation is ReLU."""
        return self.config.activation is Activation.RELU

    @property
    def knows_neurons(self) -> bool:
        """Whether the checkpoint's number of every neuron is known."""
        original = self.source.neuron_order is NeuronOrder.ORIGINAL
        return original or self.source.statistics is not None

    def check_shapes(self, directory: Path) -> None:
        """Refuse a checkpoint of other sizes or another activation (PiError)."""
        theirs = read_config(directory)
        for name in _SIZES:
            ours, other = getattr(self.config, name), getattr(theirs, name)
            if ours != other:
                raise PiError(
                    f"the file was made from another model: {name} is {ours}, the checkpoint's is {other}",
                    hint="name the checkpoint that the file was made from",
                )

    def checkpoint_sha256(self) -> str:
        """Return the hash of the checkpoint's weights, "" where the file was made from another model file."""
        made_from = self.source.origins[WEIGHTS].name
        return "" if made_from.endswith(".gguf") else self.source.source_sha256

    def elements(self) -> Counter[str]:
        """Return the number of elements of all matrices by type, predictors left out."""
        counts: Counter[str] = Counter()
        for parameter in self.source.parameters:
            if len(parameter.shape) == 2:
                dtype = self.source.entries[parameter.name].dtype
                counts[dtype] += math.prod(parameter.shape)
        return counts

    def parameters(self) -> Iterator[tuple[str, str, Values, bool]]:
        """Yield (name in transformers, type in the file, values, whether rows and columns are the checkpoint's)."""
        names = {gguf: name for name, gguf in self.config.arch.tensors.items()}
        names[Tensor.FFN_DOWN_T] = names[Tensor.FFN_DOWN]
        for parameter in self.source.parameters:
            if parameter.template == Tensor.ROPE_FREQS:
                continue  # transformers has them from config.json
            raw = self.source.read(parameter.name)
            values = to_float32(raw.data, raw.dtype).reshape(parameter.shape)
            in_order = self.knows_neurons or parameter.template not in FFN_TEMPLATES
            name = names[parameter.template].format(i=parameter.layer)
            yield name, raw.dtype, self._converted(parameter, values), in_order

    def predictors(self) -> PredictorMatrices | None:
        """Return the file's trained predictors, None where it has none."""
        weights = self.source.predictors
        return None if weights is None else _matrices(weights, self._original_rows)

    def _original_rows(self, values: Values, layer: int) -> Values:
        """Return rows, one a neuron, in the checkpoint's order if that is known."""
        permutation = self.source.original_neurons() if self.knows_neurons else None
        if permutation is None:
            return values
        out = np.empty_like(values)
        out[permutation[layer]] = values
        return out

    def _converted(self, parameter: Parameter, values: Values) -> Values:
        config = self.config
        if parameter.template in config.arch.rope_permuted:
            is_query = parameter.template in (Tensor.ATTN_Q, Tensor.ATTN_Q_BIAS)
            n_heads = config.n_heads if is_query else config.n_kv_heads
            out = np.empty_like(values)
            out[interleaved_rows(n_heads, config.head_dim)] = values
            return out
        if parameter.template == Tensor.FFN_DOWN:
            values = values.T
        if parameter.layer is not None and parameter.template in FFN_TEMPLATES:
            values = self._original_rows(values, parameter.layer)
        if parameter.template in (Tensor.FFN_DOWN, Tensor.FFN_DOWN_T):
            values = np.ascontiguousarray(values.T)
        return values


def _read_rows(weights: PredictorWeights, layer: int, name: str) -> Values:
    raw, entry = weights.read(layer, name), weights.entry(layer, name)
    return to_float32(raw.data, raw.dtype).reshape(entry.shape)


def trained_predictors(directory: Path, config: ModelConfig) -> PredictorMatrices:
    """Return the predictors of a directory, as pi-convert --predictors reads them. Raises PiError."""
    return _matrices(Predictors(directory, config), lambda values, _: values)


def _matrices(
    weights: PredictorWeights, in_order: Callable[[Values, int], Values]
) -> PredictorMatrices:
    layers = [
        None
        if exact
        else (
            _read_rows(weights, layer, FC1),
            in_order(_read_rows(weights, layer, FC2), layer),
        )
        for layer, exact in enumerate(weights.exact_layers)
    ]
    return PredictorMatrices(weights.sparse_threshold, layers)
