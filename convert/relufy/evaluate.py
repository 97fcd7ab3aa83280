"""Held-out perplexity and zero share, and the threshold that an allowance of perplexity buys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from powerinfer_toolkit import console
from powerinfer_toolkit.convert.relufy.mixture import to_sample
from powerinfer_toolkit.convert.relufy.variants import set_threshold
from powerinfer_toolkit.training.blocks import Blocks

FIRST_THRESHOLD = 1e-3
BISECTIONS = 6

Forward = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class Evaluation:
    """Cross-entropy in nats a token over `tokens` predicted tokens, and zero shares by layer."""

    loss: float
    tokens: int
    zero_share_by_layer: list[float]

    @property
    def perplexity(self) -> float:
        """exp of the loss; infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def zero_share(self) -> float:
        """Mean over layers, which all have as many neurons; 0 where nothing was measured."""
        shares = self.zero_share_by_layer
        return sum(shares) / len(shares) if shares else 0.0


@torch.no_grad()
def evaluate(forward: Forward, blocks: Blocks, batch_size: int, device: torch.device) -> Evaluation:
    """Evaluate a training forward pass on blocks [n, max_length]."""
    loss, zeros = 0.0, torch.zeros(())
    for start in range(0, len(blocks), batch_size):
        batch = blocks[start : start + batch_size]
        parts = forward(input_ids=to_sample(batch)["input_ids"].to(device))
        share = len(batch) / len(blocks)
        loss += parts["ce"].item() * share
        if "active" in parts:
            zeros = zeros + (1 - parts["active"].double().cpu()) * share
    return Evaluation(loss, blocks.size - len(blocks), zeros.tolist() if zeros.ndim else [])


def calibrate_threshold(
    model: nn.Module, measure: Callable[[], Evaluation], allowance: float
) -> float:
    """Return the largest threshold found whose perplexity is within (1 + allowance) of threshold 0's.

    `measure` evaluates the model as it is. The threshold is doubled from 0.001 until it costs too much, and
    the last interval is halved; the model is left with the result.
    """
    set_threshold(model, 0.0)
    limit = math.log1p(allowance) + measure().loss
    low, high = 0.0, FIRST_THRESHOLD
    while _costs(model, high, measure) <= limit and high < 1e3:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _costs(model, middle, measure) <= limit else (low, middle)
    set_threshold(model, low)
    return low


def _costs(model: nn.Module, threshold: float, measure: Callable[[], Evaluation]) -> float:
    set_threshold(model, threshold)
    found = measure()
    console.detail(
        f"threshold {threshold:.5f}: perplexity {found.perplexity:.3f}, zeros {found.zero_share:.2%}"
    )
    return found.loss
