"""From trained layers to predictors that keep an allowed rise of the perplexity and read the fewest bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from powerinfer_toolkit import console
from powerinfer_toolkit.train_predictor.calibration import Choice, Market, highest_price
from powerinfer_toolkit.train_predictor.groups import TrainedLayers
from powerinfer_toolkit.train_predictor.masking import masked, mean_loss, perplexity_loss
from powerinfer_toolkit.train_predictor.network import Predictor
from powerinfer_toolkit.train_predictor.texts import Blocks
from powerinfer_toolkit.train_predictor.training import Context

_DEARER = 1.25  # step of the price on parameters until they keep the budget


@dataclass(frozen=True)
class Selection:
    """Each layer's choice and predictor (None: exact); `bytes` as the curves estimate them, 1 is dense."""

    choices: list[Choice]
    predictors: list[Predictor | None]
    bytes: float
    price: float


class Selector:
    """Chooses ranks and thresholds on the calibration text."""

    def __init__(self, context: Context, trained: TrainedLayers, blocks: Blocks) -> None:
        self._context = context
        self._trained = trained
        self._blocks = blocks
        n_embd, n_ff = context.model.n_embd, context.model.n_ff
        prices = {rank: rank * (n_embd + n_ff) / (3 * n_embd) for rank in trained.fc1}
        self._market = Market(trained.curves, prices, context.settings.exact_layers)
        self._unmasked = self._loss([None] * context.model.n_layers)

    def select(self, allowed: float) -> Selection:
        """Return the best of one rank for all layers and one for each, at a perplexity loss of `allowed`."""
        ranks = list(self._trained.fc1)
        offers = [[rank] for rank in ranks]
        if len(ranks) > 1:
            offers.append(ranks)
        found = [self._select(offer, allowed) for offer in offers]
        for offer, selection in zip(offers, found, strict=True):
            console.detail(f"rank {offer}: {selection.bytes:.4f} of the bytes at {allowed:+.1%}")
        return min(found, key=lambda selection: selection.bytes)

    def _select(self, ranks: Sequence[int], allowed: float) -> Selection:
        def rise(price: float) -> float:
            predictors = self._fold(self._choose(price, ranks))
            return perplexity_loss(self._loss(predictors), self._unmasked)

        price = highest_price(rise, allowed)
        choices = self._choose(price, ranks)
        return Selection(choices, self._fold(choices), self._bytes(choices), price)

    def _choose(self, price: float, ranks: Sequence[int]) -> list[Choice]:
        """Choose within the budget: parameters get dearer until they keep it."""
        context, factor = self._context, 1.0
        per_rank = (context.model.n_embd + context.model.n_ff) / (
            3 * context.model.n_embd * context.model.n_ff
        )
        while True:
            choices = self._market.choose(price, ranks, factor)
            share = per_rank * sum(choice.rank for choice in choices) / len(choices)
            if share <= context.settings.predictor_budget or not context.settings.exact_layers:
                return choices
            factor *= _DEARER

    def _bytes(self, choices: Sequence[Choice]) -> float:
        total = 0.0
        for layer, choice in enumerate(choices):
            if choice.rank == 0:
                total += float(next(iter(self._market.curves.values())).read[layer, 0])
                continue
            curves = self._market.curves[choice.rank]
            at = int(torch.searchsorted(curves.thresholds[layer], choice.threshold))
            total += float(curves.read[layer, at]) + self._market.predictor_prices[choice.rank]
        return total / (len(choices) * self._context.model.n_ff)

    def _fold(self, choices: Sequence[Choice]) -> list[Predictor | None]:
        device = self._context.model.device
        predictors: list[Predictor | None] = []
        for layer, choice in enumerate(choices):
            if choice.rank == 0:
                predictors.append(None)
                continue
            fc1, fc2 = self._trained.fc1[choice.rank], self._trained.fc2[choice.rank]
            threshold = max(choice.threshold, -1e4)  # -infinity lets every neuron through
            predictors.append(
                Predictor.fold(fc1[layer].to(device), fc2[layer].to(device), threshold)
            )
        return predictors

    def _loss(self, predictors: Sequence[Predictor | None]) -> float:
        context = self._context
        batch_size = context.settings.per_device_batch_size
        with masked(context.model, predictors):
            return mean_loss(context.model, self._blocks, batch_size, context.accelerator)
