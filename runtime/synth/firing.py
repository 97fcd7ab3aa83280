"""How often the neurons of a synthetic layer fire, hottest first, and what a predictor lets through.

A neuron fires when a standard normal variable is below its z, so z = quantile(rate).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.gguf_format import UNION_WINDOWS

Floats = NDArray[np.float64]
PREDICTED_RATIO = 1.25  # neurons let through over neurons that fire
_SAMPLES = 1000  # neurons that the margin is found with
_MOST = 0.97  # highest firing rate
# (share of the neurons, firing rate / mean), the logarithm of the rate being linear between the points.
_KNOTS = {
    # ReGLU SmolLM2-135M: 6% of the neurons carry 32% of the activations, 26% carry 67%, 75% carry 96%.
    "smollm2": ((0.0, 9.066), (0.06, 2.8), (0.26, 1.0025), (0.75, 0.3124), (1.0, 0.0677)),
    # PowerInfer (arXiv 2312.12456): 26% carry 80%.
    "powerinfer": ((0.0, 6.978), (0.26, 1.0), (1.0, 0.02736)),
}


class Locality(StrEnum):
    """How unevenly neurons fire."""

    SMOLLM2 = "smollm2"
    POWERINFER = "powerinfer"


@dataclass(frozen=True)
class Firing:
    """What the neurons of every layer do: `z` [n_ff] falling, and the predictor's `margin`, added to z."""

    rates: Floats
    z: Floats
    margin: float

    @property
    def density(self) -> float:
        """Mean share of neurons that fire."""
        return float(self.rates.mean())

    @property
    def predicted_density(self) -> float:
        """Mean share of neurons that the predictor lets through."""
        return float(normal_cdf(self.z + self.margin).mean())

    def union_density(self) -> Floats:
        """Return the share of neurons that fire within 2, 4, ... 64 tokens, which are independent here, [6]."""
        return np.array([(1 - (1 - self.rates) ** window).mean() for window in UNION_WINDOWS])

    def mean_square_activation(self) -> float:
        """Return the mean of max(g, 0)^2 where g is normal with variance 1 and mean z."""
        density = np.exp(-0.5 * self.z**2) / math.sqrt(2 * math.pi)
        return float(((1 + self.z**2) * self.rates + self.z * density).mean())


def firing(n_ff: int, locality: Locality, zeros: float) -> Firing:
    """Return rates whose mean is 1 - zeros and whose curve is the locality's, flattened below 97%."""
    rates = _rates(n_ff, locality, 1 - zeros)
    quantile = NormalDist().inv_cdf
    z = np.array([quantile(float(rate)) for rate in rates])
    return Firing(rates, z, _margin(z, min(PREDICTED_RATIO * (1 - zeros), (2 - zeros) / 2)))


def normal_cdf(z: Floats) -> Floats:
    """Return the standard normal distribution function."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z])


def _rates(n_ff: int, locality: Locality, mean: float) -> Floats:
    shares, levels = zip(*_KNOTS[locality], strict=True)
    place = (np.arange(n_ff) + 0.5) / n_ff
    curve = np.exp(np.interp(place, shares, np.log(levels)))

    def capped(scale: float) -> Floats:
        return np.minimum(scale * curve, _MOST)

    scale = _bisect(lambda scale: float(capped(scale).mean()) - mean, 0.0, 1 / curve[-1])
    return capped(scale)


def _margin(z: Floats, density: float) -> float:
    z = z[:: max(1, len(z) // _SAMPLES)]
    return _bisect(lambda margin: float(normal_cdf(z + margin).mean()) - density, 0.0, 5.0)


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return where a rising function crosses 0."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return low
