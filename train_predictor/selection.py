"""From trained layers to predictors that keep an allowed rise of the perplexity and read the fewest bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.train_predictor.calibration import Choice, Market, highest_price
from powerinfer_toolkit.train_predictor.groups import TrainedLayers
from powerinfer_toolkit.train_predictor.masking import masked, mean_loss, perplexity_loss
from powerinfer_toolkit.train_predictor.network import Predictor
from powerinfer_toolkit.train_predictor.settings import PredictorSettings
from powerinfer_toolkit.train_predictor.texts import Blocks
from powerinfer_toolkit.train_predictor.training import Context
from powerinfer_toolkit.training.checkpoint import SparseModel

_DEARER = 1.25  # step of the price on parameters until they keep the budget


@dataclass(frozen=True)
class Selection:
    """Each layer's choice and predictor (None: exact); `bytes` as the curves estimate them, 1 is dense."""

    choices: list[Choice]
    predictors: list[Predictor | None]
    bytes: float
    price: float


def parameter_share(model: SparseModel, rank: int) -> float:
    """Return the parameters of a predictor relative to those of its layer's FFN."""
    return rank * (model.n_embd + model.n_ff) / (3 * model.n_embd * model.n_ff)


def check_budget(model: SparseModel, settings: PredictorSettings) -> None:
    """Raise PiError where layers cannot stay exact and the least rank alone exceeds the budget."""
    least = min(settings.predictor_rank)
    share = parameter_share(model, least)
    if share > settings.predictor_budget and not settings.exact_layers:
        raise PiError(
            f"rank {least} takes {share:.1%} of the FFN's parameters, the budget is "
            f"{settings.predictor_budget:.1%}",
            hint="give a lower predictor_rank, a larger predictor_budget, or exact_layers true",
        )


class Selector:
    """Chooses ranks and thresholds on the calibration text."""

    def __init__(self, context: Context, trained: TrainedLayers, blocks: Blocks) -> None:
        self._context = context
        self._trained = trained
        self._blocks = blocks
        n_ff = context.model.n_ff
        prices = {rank: n_ff * parameter_share(context.model, rank) for rank in trained.fc1}
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
        factor = 1.0
        while True:
            choices = self._market.choose(price, ranks, factor)
            shares = [parameter_share(self._context.model, choice.rank) for choice in choices]
            if sum(shares) / len(shares) <= self._context.settings.predictor_budget:
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
            predictors.append(
                Predictor.fold(fc1[layer].to(device), fc2[layer].to(device), choice.threshold)
            )
        return predictors

    def _loss(self, predictors: Sequence[Predictor | None]) -> float:
        context = self._context
        batch_size = context.settings.per_device_batch_size
        with masked(context.model, predictors):
            return mean_loss(context.model, self._blocks, batch_size, context.accelerator)
