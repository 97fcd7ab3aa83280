"""The model under its predictors' masks, as the runtime applies them, and the perplexity of texts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import cross_entropy

from powerinfer_toolkit.train_predictor.network import Predictor
from powerinfer_toolkit.train_predictor.texts import Blocks
from powerinfer_toolkit.training.checkpoint import SparseModel

SINK_POSITIONS = 1  # leading positions that are never masked
_HEAD_TOKENS = 2048

# (layer, hidden [n_sequences, n_positions, n_ff], kept, same shape, bool)
OnMask = Callable[[int, Tensor, Tensor], None]


def to_tokens(blocks: Blocks, device: torch.device) -> Tensor:
    """Return blocks as the model wants them, int64 [n_blocks, n_positions]."""
    return torch.from_numpy(blocks.astype(np.int64)).to(device)


@contextlib.contextmanager
def masked(
    model: SparseModel,
    predictors: Sequence[Predictor | None],
    on_mask: OnMask | None = None,
    sink_positions: int = SINK_POSITIONS,
) -> Iterator[None]:
    """Drop what the predictors do not let through; None leaves a layer exact, as leading positions are."""

    def tap(layer: int, residual: Tensor, hidden: Tensor) -> Tensor | None:
        predictor = predictors[layer]
        if predictor is None:
            kept = torch.ones_like(hidden, dtype=torch.bool)
        else:
            kept = predictor.predicts(residual)
            kept[:, :sink_positions] = True
        if on_mask is not None:
            on_mask(layer, hidden, kept)
        return None if predictor is None else hidden * kept

    with model.tapped(tap):
        yield


@torch.inference_mode()
def mean_loss(
    model: SparseModel, blocks: Blocks, batch_size: int, accelerator: Accelerator
) -> float:
    """Return the mean negative log-likelihood in nats of every token of `blocks` but each block's first.

    blocks is [n_blocks, n_positions]; every process takes a share of them.
    """
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    share = blocks[accelerator.process_index :: accelerator.num_processes]
    for begin in range(0, len(share), batch_size):
        tokens = to_tokens(share[begin : begin + batch_size], model.device)
        states = model.hidden_states(tokens)[:, :-1].flatten(0, 1).split(_HEAD_TOKENS)
        targets = tokens[:, 1:].flatten().split(_HEAD_TOKENS)
        for chunk, labels in zip(states, targets, strict=True):
            logits = model.model.lm_head(chunk).float()
            total += cross_entropy(logits, labels, reduction="sum").double()
    loss: Tensor = accelerator.reduce(total, "sum") / (blocks.size - len(blocks))
    return float(loss)


def perplexity_loss(masked_loss: float, unmasked_loss: float) -> float:
    """Return the relative rise of the perplexity, 0.01 for 1%."""
    return math.expm1(masked_loss - unmasked_loss)
