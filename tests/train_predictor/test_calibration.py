"""Curves against a plain count, choices against all choices, bisection (about 2 s)."""

import math

import numpy as np
import pytest
import torch

from powerinfer_toolkit.train_predictor.calibration import (
    EXACT,
    Choice,
    CurveMeter,
    Curves,
    Market,
    highest_price,
)
from powerinfer_toolkit.train_predictor.capture import Costs


class LinearStack:
    """A stack whose logits are given."""

    def __init__(self, logits):
        self.logits = logits

    def __call__(self, numbers):
        return self.logits[:, numbers[0]]


def drawn(n_tokens=300, seed=0):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(2, n_tokens, 7)) * [[[1.0]], [[40.0]]]).float()
    fires = torch.from_numpy(rng.random((2, n_tokens, 7)) < 0.3).float()
    miss = fires * torch.from_numpy(rng.random((2, n_tokens, 7))).float()
    return logits, Costs(miss, 1 / 3 + 2 / 3 * fires)


def test_curves_are_what_a_plain_count_gives(context):
    logits, costs = drawn()
    meter = CurveMeter(LinearStack(logits))
    for part in (slice(0, 130), slice(130, 300)):
        meter.add(torch.arange(300)[None, part], _part(costs, part))
    curves = meter.curves(context())
    assert curves.thresholds[:, 0].tolist() == [-math.inf] * 2
    for layer in range(2):
        for at in range(0, curves.thresholds.shape[1], 16):
            kept = logits[layer] >= curves.thresholds[layer, at]
            missed = float((costs.miss[layer] * ~kept).sum()) / 300
            read = float((costs.read[layer] * kept).sum()) / 300
            assert float(curves.missed[layer, at]) == pytest.approx(missed, abs=1e-4)
            assert float(curves.read[layer, at]) == pytest.approx(read, abs=1e-4)


def _part(costs, part):
    return Costs(costs.miss[:, part], costs.read[:, part])


@pytest.fixture
def market():
    """Two layers, thresholds -inf, 0, 1; rank 4 predicts worse than rank 8 and costs less."""
    thresholds = torch.tensor([[-math.inf, 0.0, 1.0]] * 2)
    small = Curves(
        thresholds,
        torch.tensor([[0.0, 2.0, 6.0], [0.0, 9.0, 9.5]]),
        torch.tensor([[10.0, 4.0, 2.0], [10.0, 9.0, 8.0]]),
    )
    large = Curves(
        thresholds,
        torch.tensor([[0.0, 1.0, 5.0], [0.0, 0.2, 1.0]]),
        torch.tensor([[10.0, 4.0, 1.0], [10.0, 3.0, 1.0]]),
    )
    return Market({4: small, 8: large}, {4: 0.5, 8: 1.6}, may_be_exact=True)


@pytest.mark.parametrize("price", [0.05, 0.3, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("ranks", [[4], [8], [4, 8]])
def test_the_cheapest_of_all_choices_is_taken(market, price, ranks):
    for layer, choice in enumerate(market.choose(price, ranks)):
        offers = {EXACT: price * 10.0}
        for rank in ranks:
            curves = market.curves[rank]
            for at, threshold in enumerate(curves.thresholds[layer].tolist()):
                total = float(curves.missed[layer, at] + price * curves.read[layer, at])
                offers[Choice(rank, threshold)] = total + price * market.predictor_prices[rank]
        assert offers[choice] == pytest.approx(min(offers.values()))


def test_a_layer_whose_predictor_does_not_pay_stays_exact(market):
    assert market.choose(1.0, [4])[1] == EXACT
    assert market.choose(1.0, [8])[1] != EXACT
    dear = {4: 5.0, 8: 5.0}  # 6 with rank 4 and threshold 0 in layer 0, and 10 if it is exact
    assert Market(market.curves, dear, may_be_exact=True).choose(1.0, [4])[0] == EXACT
    assert Market(market.curves, dear, may_be_exact=False).choose(1.0, [4])[0] == Choice(4, 0.0)


def test_a_threshold_that_lets_everything_through_is_an_exact_layer(market):
    forced = Market(market.curves, market.predictor_prices, may_be_exact=False)
    assert forced.choose(0.001, [4, 8]) == [EXACT, EXACT]


def test_dearer_parameters_lower_the_ranks(market):
    ranks = [sum(c.rank for c in market.choose(1.0, [4, 8], factor)) for factor in (1, 2, 4, 50)]
    assert ranks == sorted(ranks, reverse=True)
    assert ranks[-1] == 0


def test_the_highest_price_within_the_allowance():
    price = highest_price(lambda price: 0.01 * price, 0.03)
    assert price <= 3.0
    assert price == pytest.approx(3.0, rel=0.005)  # 14 halvings of a range of ln 1e8
