"""Which tensors a synthetic model has, and where the rows of each come from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.gguf_format import Tensor, TensorType
from powerinfer_toolkit.gguf_types import n_bytes
from powerinfer_toolkit.runtime.synth.pools import Pools, Rows

_CHUNK_BYTES = 1 << 20  # written at a time: they stay in a cache


@dataclass(frozen=True)
class SynthTensor:
    """One tensor of the file: row i is pool row (first + i) % len(pool), its beginning overwritten.

    `constants` [n_rows, bytes] are the beginnings, None where rows stay as they are. The first `n_zero_rows` are zero.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    pool: Rows
    first: int = 0
    constants: Rows | None = None
    n_zero_rows: int = 0

    @property
    def n_bytes(self) -> int:
        """Size in the file, without padding."""
        return n_bytes(self.type, self.shape)

    def chunks(self) -> Iterator[Rows]:
        """Yield the rows, some at a time, in a buffer that the next ones overwrite."""
        n_rows = math.prod(self.shape[:-1])
        step = max(1, _CHUNK_BYTES // self.pool.shape[1])
        buffer = np.empty((step, self.pool.shape[1]), np.uint8)
        for begin in range(0, n_rows, step):
            places = np.arange(begin, min(begin + step, n_rows))
            rows = buffer[: len(places)]
            np.take(
                self.pool, (places + self.first) % len(self.pool), axis=0, out=rows, mode="clip"
            )
            if self.constants is not None:
                rows[:, : self.constants.shape[1]] = self.constants[places]
            rows[: max(0, self.n_zero_rows - begin)] = 0
            yield rows


def synth_tensors(pools: Pools, *, dense_twin: bool) -> Iterator[SynthTensor]:
    """Yield all tensors of the sparse model, or of its twin in the plain layout of dense files."""
    shape = pools.shape
    table = (shape.n_vocab, shape.n_embd)
    yield SynthTensor(Tensor.TOKEN_EMBD, table, pools.types.embedding, pools.embedding)
    yield _ones(Tensor.OUTPUT_NORM, shape.n_embd)
    # The likeliest token after t is t + 1: a greedy text goes through the vocabulary.
    yield SynthTensor(Tensor.OUTPUT, table, pools.types.embedding, pools.head, first=-1)
    for layer in range(pools.n_layers):
        yield from _attention(pools, layer)
        yield from _ffn(pools, layer, dense_twin=dense_twin)


def _attention(pools: Pools, layer: int) -> Iterator[SynthTensor]:
    shape, kind = pools.shape, pools.types.matrix
    first = _first_rows(pools, layer, 0)
    n_q, n_kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    yield _ones(Tensor.ATTN_NORM.format(i=layer), shape.n_embd)
    for place, (template, n_rows, pool) in enumerate(
        (
            (Tensor.ATTN_Q, n_q, pools.query_key),
            (Tensor.ATTN_K, n_kv, pools.query_key),
            (Tensor.ATTN_V, n_kv, pools.plain),
        )
    ):
        name = template.format(i=layer)
        yield SynthTensor(name, (n_rows, shape.n_embd), kind, pool, first[place])
    yield SynthTensor(
        Tensor.ATTN_OUTPUT.format(i=layer),
        (shape.n_embd, n_q),
        kind,
        pools.attention_output,
        first[3],
        n_zero_rows=pools.n_constant,
    )


def _ffn(pools: Pools, layer: int, *, dense_twin: bool) -> Iterator[SynthTensor]:
    shape, kind = pools.shape, pools.types.matrix
    first = _first_rows(pools, layer, 1)
    neurons = (shape.n_ff, shape.n_embd)

    def name(template: str) -> str:
        return template.format(i=layer)

    yield _ones(name(Tensor.FFN_NORM), shape.n_embd)
    gates = pools.gate_constants
    yield SynthTensor(name(Tensor.FFN_GATE), neurons, kind, pools.gate, first[0], gates)
    yield SynthTensor(name(Tensor.FFN_UP), neurons, kind, pools.plain, first[1])
    if dense_twin:
        plain, n_zero = (shape.n_embd, shape.n_ff), pools.n_constant
        down = name(Tensor.FFN_DOWN)
        yield SynthTensor(down, plain, kind, pools.down, first[2], n_zero_rows=n_zero)
        return
    yield SynthTensor(name(Tensor.FFN_DOWN_T), neurons, kind, pools.down_t, first[2])
    rank, types = shape.predictor_rank, pools.types
    yield SynthTensor(name(Tensor.PREDICTOR_FC1), (rank, shape.n_embd), types.fc1, pools.fc1)
    # row for row the gate's weights
    fc2, constants = (shape.n_ff, rank), pools.fc2_constants
    yield SynthTensor(name(Tensor.PREDICTOR_FC2), fc2, types.fc2, pools.fc2, first[0], constants)


def _first_rows(pools: Pools, layer: int, part: int) -> list[int]:
    """Return where in their pools four matrices of a layer begin, so that layers differ."""
    rng = np.random.default_rng([pools.seed, 7, layer, part])
    return [int(first) for first in rng.integers(0, 1 << 30, 4)]


def _ones(name: str, n: int) -> SynthTensor:
    ones: NDArray[np.uint8] = np.ones((1, n), np.float32).view(np.uint8)
    return SynthTensor(name, (n,), TensorType.F32, ones)
