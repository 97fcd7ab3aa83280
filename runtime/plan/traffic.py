"""What decoding one token reads from memory, and how fast a machine can be at best (docs/bench.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from powerinfer_toolkit.gguf_format import Tensor
from powerinfer_toolkit.runtime.model_file import TensorEntry
from powerinfer_toolkit.runtime.plan.plan import FfnMode, Plan
from powerinfer_toolkit.runtime.plan.planner import kv_token_bytes
from powerinfer_toolkit.runtime.plan.shape import ModelShape


def _suffix(template: str) -> str:
    return template.removeprefix("blk.{i}")


_GATE = _suffix(Tensor.FFN_GATE)
_UP_DOWN = tuple(map(_suffix, (Tensor.FFN_UP, Tensor.FFN_DOWN, Tensor.FFN_DOWN_T)))
_PREDICTOR = tuple(map(_suffix, (Tensor.PREDICTOR_FC1, Tensor.PREDICTOR_FC2)))


@dataclass(frozen=True)
class WeightBytes:
    """Sizes of a model's weights by when decoding reads them.

    `always`: attention, norms, head and one row of the embedding. `predictor` only in predicted mode; of `gate`
    the rows of neurons let through, of `up_down` those of neurons that fire.
    """

    always: int
    gate: int
    up_down: int
    predictor: int


def weight_bytes(tensors: Iterable[TensorEntry], shape: ModelShape) -> WeightBytes:
    """Add up the tensors of a file."""
    always = gate = up_down = predictor = 0
    for tensor in tensors:
        if tensor.name.endswith(_GATE):
            gate += tensor.n_bytes
        elif tensor.name.endswith(_UP_DOWN):
            up_down += tensor.n_bytes
        elif tensor.name.endswith(_PREDICTOR):
            predictor += tensor.n_bytes
        elif tensor.name == Tensor.TOKEN_EMBD and not shape.tied_head:
            always += tensor.n_bytes // shape.n_vocab
        else:
            always += tensor.n_bytes
    return WeightBytes(always, gate, up_down, predictor)


def decode_bytes(
    weights: WeightBytes,
    shape: ModelShape,
    plan: Plan,
    *,
    n_positions: float,
    active_share: float,
    guessed_share: float,
) -> float:
    """Return the bytes that a step of one token reads, on average.

    `n_positions` of the KV cache are read; `active_share` of the neurons fire and `guessed_share` of them have
    their gate computed, both 1 in a dense run.
    """
    ffn = weights.gate * guessed_share + weights.up_down * active_share
    if plan.ffn_mode is FfnMode.PREDICTED:
        ffn += weights.predictor
    return weights.always + ffn + n_positions * kv_token_bytes(shape, plan)
