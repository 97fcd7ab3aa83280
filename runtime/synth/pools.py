"""The weights of a synthetic model: rows in their final type, tiled from modest pools of random ones.

The residual x of a token is its embedding and little else: what attention and FFN add is scaled to a few per cent.
It has n_constant coordinates of one fixed value c, which nothing writes to, and n_signal coordinates of normal
numbers. A gate row is random but for its constant coordinates, which hold z_j w, so that its pre-activation is
normal with mean z_j and variance 1, up to a factor, and the neuron fires at the rate that z_j stands for. The
predictor's fc1 passes c and the signal on (as positive and negative parts, since a ReLU follows) and fc2 holds the
gate row's weights of the signal and z_j + margin: it knows the pre-activation but for what the layers added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import gguf
import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.gguf_types import block_elements, n_bytes, quantise
from powerinfer_toolkit.runtime.synth.firing import Firing
from powerinfer_toolkit.runtime.synth.shapes import SynthShape

Rows = NDArray[np.uint8]  # [n_rows, row bytes]
_POOL_ELEMENTS = 1 << 25  # at most
_NEURON_ROWS, _TOKEN_ROWS, _OTHER_ROWS = 4096, 4096, 1024  # different rows, at most
_WEIGHT = 0.02  # standard deviation of most weights
_SHARP = 0.4  # of q and k, relative to that: softmax neither flat nor a single position
_SIGNAL = 32.0  # standard deviation of the embedding's signal
_NOISE = 0.05  # of a pre-activation: what all layers together add, relative to the signal
_PREDICTOR_CONSTANT = 32  # rows of fc1 that pass the constant on: a block of fc2


@dataclass(frozen=True)
class Types:
    """Types of the matrices: most of them, token_embd and output, and the predictors' two."""

    matrix: TensorType
    embedding: TensorType
    fc1: TensorType
    fc2: TensorType


class Pools:
    """Pools of rows of every kind of matrix, made on first use; the same seed makes the same pools."""

    def __init__(
        self, shape: SynthShape, n_layers: int, types: Types, firing: Firing, seed: int
    ) -> None:
        self.shape = shape
        self.types = types
        self.n_layers = n_layers
        self.firing = firing
        self.seed = seed
        self.n_constant = max(32, block_elements(types.matrix))
        self.n_signal = (shape.predictor_rank - _PREDICTOR_CONSTANT) // 2
        self._constant = math.sqrt(self.n_signal) * _SIGNAL / self.n_constant

    @cached_property
    def gate(self) -> Rows:
        """Rows [pool, n_embd] whose constant coordinates gate_constants() fills."""
        return self._quantised(self._gate_values, self.types.matrix)

    @cached_property
    def gate_constants(self) -> Rows:
        """The beginning of every gate row [n_ff, bytes]: n_constant times z_j w."""
        values = _WEIGHT * self.firing.z
        return self._constants(values, self.n_constant, self.types.matrix)

    @cached_property
    def plain(self) -> Rows:
        """Rows [pool, n_embd] of up and v."""
        return self._random(1, self.shape.n_embd, _WEIGHT, self.types.matrix)

    @cached_property
    def query_key(self) -> Rows:
        """Rows [pool, n_embd] of q and k."""
        return self._random(2, self.shape.n_embd, _SHARP * _WEIGHT, self.types.matrix)

    @cached_property
    def down_t(self) -> Rows:
        """Rows [pool, n_embd] that add nothing to the constant coordinates."""
        values = self._normal(3, self.shape.n_embd, self._down_deviation)
        values[:, : self.n_constant] = 0
        return self._quantised(values, self.types.matrix)

    @cached_property
    def down(self) -> Rows:
        """Rows [pool, n_ff] of the plain layout."""
        return self._random(4, self.shape.n_ff, self._down_deviation, self.types.matrix)

    @cached_property
    def attention_output(self) -> Rows:
        """Rows [pool, n_heads * head_dim]."""
        n_columns = self.shape.n_heads * self.shape.head_dim
        value = _WEIGHT * math.sqrt(self.shape.n_embd)  # of v
        return self._random(
            5, n_columns, self._added / (math.sqrt(n_columns) * value), self.types.matrix
        )

    @cached_property
    def embedding(self) -> Rows:
        """Rows [pool, n_embd]: the constant, and the token's signal."""
        values = self._signals(_SIGNAL)
        values[:, : self.n_constant] = self._constant
        return self._quantised(values, self.types.embedding)

    @cached_property
    def head(self) -> Rows:
        """Rows [pool, n_embd]: the token's signal, small."""
        return self._quantised(self._signals(_WEIGHT), self.types.embedding)

    @cached_property
    def fc1(self) -> Rows:
        """The predictor's first matrix [rank, n_embd]: mean of the constant, the signal, and the signal negated."""
        n = self.n_signal
        values = np.zeros((self.shape.predictor_rank, self.shape.n_embd), np.float32)
        values[:_PREDICTOR_CONSTANT, : self.n_constant] = 1 / self.n_constant
        signal = self.n_constant + np.arange(n)
        values[_PREDICTOR_CONSTANT + np.arange(n), signal] = 1
        values[_PREDICTOR_CONSTANT + n + np.arange(n), signal] = -1
        return self._quantised(values, self.types.fc1)

    @cached_property
    def fc2(self) -> Rows:
        """Rows [pool, rank] of the second matrix, whose first block fc2_constants() fills."""
        signal = slice(self.n_constant, self.n_constant + self.n_signal)
        kind = gguf.GGMLQuantizationType(self.types.matrix)
        weights = gguf.quants.dequantize(self.gate, kind)[:, signal]
        zeros = np.zeros((len(weights), _PREDICTOR_CONSTANT), np.float32)
        values = np.concatenate([zeros, weights, -weights], axis=1)
        return self._quantised(values, self.types.fc2)

    @cached_property
    def fc2_constants(self) -> Rows:
        """The first block of every row of fc2 [n_ff, bytes]."""
        scale = _WEIGHT * self.n_constant / _PREDICTOR_CONSTANT
        values = scale * (self.firing.z + self.firing.margin)
        return self._constants(values, _PREDICTOR_CONSTANT, self.types.fc2)

    @property
    def _added(self) -> float:
        """Standard deviation of what one attention or FFN adds to a coordinate."""
        n_noise = self.shape.n_embd - self.n_constant
        variance = _NOISE**2 * self.n_signal / (2 * self.n_layers * n_noise)
        return _SIGNAL * math.sqrt(variance)

    @property
    def _down_deviation(self) -> float:
        variance = _WEIGHT**2 * self.shape.n_embd  # of a pre-activation and of up's output
        products = self.shape.n_ff * self.firing.mean_square_activation()
        return self._added / (variance * math.sqrt(products))

    @cached_property
    def _gate_values(self) -> NDArray[np.float32]:
        """Random rows, scaled so that all of them weigh the signal alike."""
        values = self._normal(0, self.shape.n_embd, 1.0, _NEURON_ROWS)
        signal = values[:, self.n_constant : self.n_constant + self.n_signal]
        norms = np.sqrt((signal**2).sum(axis=1, keepdims=True))
        values *= _WEIGHT * math.sqrt(self.n_signal) / norms
        values[:, : self.n_constant] = 0
        return values

    def _signals(self, deviation: float) -> NDArray[np.float32]:
        n_rows = min(_TOKEN_ROWS, self.shape.n_vocab, _POOL_ELEMENTS // self.shape.n_embd)
        values = np.zeros((n_rows, self.shape.n_embd), np.float32)
        rng = np.random.default_rng([self.seed, 6])
        signal = rng.standard_normal((n_rows, self.n_signal), dtype=np.float32)
        values[:, self.n_constant : self.n_constant + self.n_signal] = deviation * signal
        return values

    def _random(self, stream: int, n_columns: int, deviation: float, kind: TensorType) -> Rows:
        return self._quantised(self._normal(stream, n_columns, deviation), kind)

    def _normal(
        self, stream: int, n_columns: int, deviation: float, most_rows: int = _OTHER_ROWS
    ) -> NDArray[np.float32]:
        rng = np.random.default_rng([self.seed, stream])
        n_rows = min(most_rows, self.shape.n_ff, _POOL_ELEMENTS // n_columns)
        values = rng.standard_normal((n_rows, n_columns), dtype=np.float32)
        values *= np.float32(deviation)
        return values

    def _quantised(self, values: NDArray[np.float32], kind: TensorType) -> Rows:
        rows = np.ascontiguousarray(quantise(values, kind)).view(np.uint8)
        return rows.reshape(len(values), -1)

    def _constants(self, values: NDArray[np.float64], n: int, kind: TensorType) -> Rows:
        repeated = np.repeat(values.astype(np.float32)[:, None], n, axis=1)
        rows = self._quantised(repeated, kind)
        assert rows.shape[1] == n_bytes(kind, (n,))
        return rows
