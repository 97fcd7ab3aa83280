"""Thresholds and ranks: where the byte price and the cost of misses meet, at an allowed rise of the perplexity.

For each layer two curves over the threshold are measured on a text of their own: the cost of what is missed, and
the bytes that are read. At a price m (times the trained one) a layer takes the threshold with the least
misses + m * bytes, or stays exact where that is cheaper: equal marginal damage a byte in all layers. The price is
then raised until the masked perplexity is what is allowed; estimates of damage decide between layers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from powerinfer_toolkit.train_predictor.capture import Costs
from powerinfer_toolkit.train_predictor.network import PredictorStack
from powerinfer_toolkit.train_predictor.texts import Blocks
from powerinfer_toolkit.train_predictor.training import Context

N_EDGES = 257
_SPAN = 4.0  # standard deviations of a layer's logits that the thresholds cover
_PRICES = (1e-4, 1e4)
_BISECTIONS = 14


@dataclass(frozen=True)
class Curves:
    """Means a token over the thresholds of each layer, in prices of a neuron; all [n_layers, n_thresholds].

    The first threshold is -infinity: nothing is missed, and what is read is what an exact layer reads.
    """

    thresholds: Tensor
    missed: Tensor
    read: Tensor


class CurveMeter:
    """Adds up the curves of one stack."""

    def __init__(self, stack: PredictorStack) -> None:
        self._stack = stack
        self._edges = torch.empty(0)  # [n_layers, N_EDGES]
        self._sums = torch.empty(
            0
        )  # [2, n_layers, N_EDGES + 1]: missed, read by place among the edges
        self._n_tokens = 0

    @torch.no_grad()
    def add(self, inputs: Tensor, costs: Costs) -> None:
        """Take in tokens: inputs [n_layers, n_tokens, n_embd]."""
        logits = self._stack(inputs)
        if self._n_tokens == 0:
            self._start(logits)
        for layer, edges in enumerate(self._edges):
            place = torch.bucketize(logits[layer].flatten(), edges, right=True)
            for which, cost in enumerate((costs.miss, costs.read)):
                sums = torch.bincount(place, cost[layer].flatten().double(), N_EDGES + 1)
                self._sums[which, layer] += sums
        self._n_tokens += inputs.shape[1]

    def _start(self, logits: Tensor) -> None:
        n_layers = len(logits)
        steps = torch.linspace(-_SPAN, _SPAN, N_EDGES - 1, device=logits.device)
        edges = steps * logits.std(dim=(1, 2))[:, None]
        lowest = torch.full((n_layers, 1), -math.inf, device=logits.device)
        self._edges = torch.cat([lowest, edges], dim=1)
        self._sums = torch.zeros(
            2, n_layers, N_EDGES + 1, dtype=torch.float64, device=logits.device
        )

    def curves(self, context: Context) -> Curves:
        """Return the curves over the tokens of all processes."""
        n_tokens = torch.tensor(float(self._n_tokens), device=self._sums.device)
        sums = context.accelerator.reduce(self._sums, "sum") / context.accelerator.reduce(
            n_tokens, "sum"
        )
        missed, read = sums.cumsum(-1)
        above = read[:, -1:] - read
        return Curves(self._edges.cpu(), missed[:, :-1].cpu(), above[:, :-1].cpu())


def measure_curves(
    context: Context, blocks: Blocks, layers: Sequence[int], stacks: Sequence[PredictorStack]
) -> list[Curves]:
    """Return the curves of every stack over `blocks`."""
    meters = [CurveMeter(stack) for stack in stacks]
    for tokens in context.batches(blocks, "curves"):
        captured = context.capture(tokens, layers)
        n_parts = context.n_parts(captured.inputs.shape[1])
        for number in range(n_parts):
            part = captured.part(number, n_parts)
            costs = context.costs.of(part, layers)
            for meter in meters:
                meter.add(part.inputs, costs)
    return [meter.curves(context) for meter in meters]


@dataclass(frozen=True)
class Choice:
    """What one layer does: rank and threshold, or rank 0: it stays exact."""

    rank: int
    threshold: float = 0.0


EXACT = Choice(0)


@dataclass(frozen=True)
class Market:
    """The curves of all layers by rank, and what a predictor of each rank costs to read, in prices."""

    curves: dict[int, Curves]
    predictor_prices: dict[int, float]
    may_be_exact: bool

    def choose(
        self, price: float, ranks: Sequence[int], predictor_factor: float = 1.0
    ) -> list[Choice]:
        """Return each layer's best choice among `ranks` at `price`; a factor makes parameters dearer."""
        options = {rank: self._best(price, rank, predictor_factor) for rank in ranks}
        choices = []
        for layer in range(len(self.curves[ranks[0]].read)):
            totals = {rank: float(total[layer]) for rank, (total, _) in options.items()}
            rank = min(totals, key=lambda rank: totals[rank])
            exact = price * float(self.curves[rank].read[layer, 0])
            at = int(options[rank][1][layer])
            if at == 0 or (self.may_be_exact and exact <= totals[rank]):
                choices.append(
                    EXACT
                )  # a threshold of -infinity reads as much, and the predictor besides
                continue
            choices.append(Choice(rank, float(self.curves[rank].thresholds[layer, at])))
        return choices

    def _best(self, price: float, rank: int, predictor_factor: float) -> tuple[Tensor, Tensor]:
        """Return the least total of each layer and where it is."""
        curves = self.curves[rank]
        totals = curves.missed + price * curves.read
        least, at = totals.min(dim=1)
        return least + price * predictor_factor * self.predictor_prices[rank], at


def highest_price(
    rise: Callable[[float], float], allowed: float, prices: tuple[float, float] = _PRICES
) -> float:
    """Return the highest price found by bisection of its logarithm whose rise(price) is at most `allowed`."""
    low, high = (math.log(price) for price in prices)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if rise(math.exp(middle)) <= allowed else (low, middle)
    return math.exp(low)
