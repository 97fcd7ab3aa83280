"""What decoding one token costs under a placement: bytes read on either side, and the time of it (docs/plan.md).

All of it is expectation: a token after half a context, neurons that fire as the file's statistics say.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.gguf_format import COVERAGE_POINTS, Activation
from powerinfer_toolkit.runtime.plan.need import is_on_gpu, kv_token_bytes, uses_predictor
from powerinfer_toolkit.runtime.plan.plan import (
    FfnMode,
    LayerPlace,
    Plan,
    Side,
    UnitKind,
    layer_places,
)
from powerinfer_toolkit.runtime.plan.profile import MachineProfile
from powerinfer_toolkit.runtime.plan.shape import Firing, ModelShape

Floats = NDArray[np.float64]
UNKNOWN_DENSITY = 0.25  # of a ReLU model that came without statistics
LEAST_HANDOVER_SECONDS = 5e-6  # of a split layer
GUESS_RATIO = 1.25  # neurons let through over neurons that fire, where the file does not say
_SEGMENTS = COVERAGE_POINTS - 1
_POINTS = np.arange(COVERAGE_POINTS)
_BISECTIONS = 60  # in search of the scale that gives a mean


@dataclass(frozen=True)
class Shares:
    """Mean shares of the neurons that fire, and that have their gate computed; None: what the file says."""

    active: float | None = None
    guessed: float | None = None


@dataclass(frozen=True)
class LayerCost:
    """What one layer reads at a token, in bytes, and the seconds that takes at a machine's rates.

    `always` is attention, KV cache and predictor, read where they are before the neurons. Seconds of neurons are
    those of either side by itself; a layer takes the longer ones.
    """

    place: LayerPlace
    always_bytes: float
    hot_bytes: float
    pull_bytes: float
    cold_bytes: float
    always_seconds: float
    gpu_seconds: float  # of hot and pulled neurons
    cpu_seconds: float  # of cold neurons
    handover_seconds: float

    @property
    def seconds(self) -> float:
        """Everything."""
        return self.always_seconds + max(self.gpu_seconds, self.cpu_seconds) + self.handover_seconds

    @property
    def ffn_bytes(self) -> float:
        """What the neurons read on all sides."""
        return self.hot_bytes + self.pull_bytes + self.cold_bytes


@dataclass(frozen=True)
class TokenCost:
    """What a token costs: its layers, and what is read once (head, norm and a row of the embedding)."""

    layers: tuple[LayerCost, ...]
    head_bytes: float
    head_on_gpu: bool
    head_seconds: float

    @cached_property
    def seconds(self) -> float:
        """The time of one token."""
        return self.head_seconds + sum(layer.seconds for layer in self.layers)

    @property
    def n_bytes(self) -> float:
        """What is read on all sides."""
        return self.head_bytes + sum(layer.always_bytes + layer.ffn_bytes for layer in self.layers)


class Reads:
    """Bytes that a token reads, from the sizes and statistics of a model."""

    def __init__(
        self,
        shape: ModelShape,
        plan: Plan,
        shares: Shares | None = None,
        n_positions: float | None = None,
    ) -> None:
        """Take a token after n_positions others; None: half of the context."""
        shares = shares or Shares()
        positions = plan.n_context / 2 if n_positions is None else n_positions
        self.n_ff = shape.n_ff
        self._shape, self._plan = shape, plan
        self._kv_bytes = kv_token_bytes(shape, plan) / shape.n_layers * positions
        self._rates = firing_rates(shape, shares.active)
        self._guesses = with_mean(self._rates, self._guessed(shares))

    def _guessed(self, shares: Shares) -> float:
        """Return the share of neurons that predictors let through where they are used."""
        if shares.guessed is None:
            unknown = min(1.0, GUESS_RATIO * float(self._rates.mean()))
            found = self._shape.predicted_density
            return unknown if found is None else found
        places = layer_places(self._plan.units, self._shape.n_layers)
        n_exact = sum(self._mode(place) is not FfnMode.PREDICTED for place in places)
        n_predicted = len(places) - n_exact
        mean = (shares.guessed * len(places) - n_exact) / n_predicted if n_predicted else 1.0
        return min(1.0, max(0.0, mean))

    def always(self, place: LayerPlace) -> float:
        """Return the bytes of attention, KV cache and predictor."""
        size = self._shape.parts.layers[place.layer]
        predictor = size.predictor if self._mode(place) is FfnMode.PREDICTED else 0
        return size.attention + self._kv_bytes + predictor

    def _mode(self, place: LayerPlace) -> FfnMode:
        """Return how a single token's neurons are chosen."""
        if self._plan.ffn_mode is not FfnMode.PREDICTED:
            return self._plan.ffn_mode
        exact = bool(self._shape.exact_layers) and self._shape.exact_layers[place.layer]
        masked = uses_predictor(self._plan, place) and not exact
        return FfnMode.PREDICTED if masked else FfnMode.EXACT

    def neurons(self, place: LayerPlace) -> Floats:
        """Return the bytes read of the first i/128 of a layer's neurons, [129]."""
        size = self._shape.parts.layers[place.layer]
        rates, mode = self._rates[place.layer], self._mode(place)
        if mode is FfnMode.DENSE:
            each = np.full(_SEGMENTS, float(size.gate + size.up_down))
        else:
            masked = mode is FfnMode.PREDICTED
            gates = self._guesses[place.layer] if masked else np.ones(_SEGMENTS)
            each = size.gate * gates + size.up_down * rates
        return np.concatenate([[0.0], np.cumsum(each / _SEGMENTS)])

    def before(self, place: LayerPlace, n_neurons: NDArray[np.int64]) -> Floats:
        """Return the bytes read of a layer's first neurons, for several numbers of them."""
        marks = n_neurons * (_SEGMENTS / self._shape.n_ff)
        found: Floats = np.interp(marks, _POINTS, self.neurons(place))
        return found

    def count(self, place: LayerPlace, n_bytes: float) -> float:
        """Return how many of a layer's first neurons read so many bytes."""
        found = np.interp(n_bytes, self.neurons(place), _POINTS)
        return float(found) * self._shape.n_ff / _SEGMENTS

    def activation_shares(self, place: LayerPlace) -> tuple[float, float, float]:
        """Return the shares of a layer's activations that its hot, pulled and cold neurons carry."""
        carried = np.concatenate([[0.0], np.cumsum(self._rates[place.layer])])
        if carried[-1] == 0.0:
            carried = _POINTS.astype(np.float64)
        marks = np.array([0, place.n_hot, place.n_pull, self.n_ff]) * (_SEGMENTS / self.n_ff)
        hot, pulled, cold = np.diff(np.interp(marks, _POINTS, carried / carried[-1])).tolist()
        return hot, pulled, cold

    def head(self) -> float:
        """Return the bytes of head, norm and one row of the embedding."""
        sizes = self._shape.parts
        row = sizes.embedding // self._shape.n_vocab if sizes.head else 0
        return (sizes.head or sizes.embedding) + sizes.output_norm + row


def firing_rates(shape: ModelShape, active: float | None = None) -> Floats:
    """Return how often neurons fire, [n_layers, 128], a value for each 128th of a layer's neurons in file order.

    `active` replaces the mean over all neurons and leaves the layers' curves as they are.
    """
    sparse = shape.activation is Activation.RELU and shape.sparse_layout
    default = Firing(UNKNOWN_DENSITY if sparse else 1.0)
    firing = shape.firing if shape.firing and sparse else (default,) * shape.n_layers
    rates = np.ones((shape.n_layers, _SEGMENTS))
    for row, layer in zip(rates, firing, strict=True):
        curve = np.diff(layer.coverage) * _SEGMENTS if layer.coverage else 1.0
        row *= layer.density * curve
    # A curve of counts falls; float32 sums may not, by their last bits.
    rates = np.minimum.accumulate(np.clip(rates, 0.0, 1.0), axis=1)
    return rates if active is None else with_mean(rates, active)


def with_mean(rates: Floats, mean: float) -> Floats:
    """Return rates scaled to a mean, none of them above 1; all equal where they were 0."""
    if not rates.any():
        return np.full_like(rates, mean)
    low, high = 0.0, 1 / rates[rates > 0].min()
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found: Floats = np.minimum(1.0, rates * middle)
        low, high = (middle, high) if found.mean() < mean else (low, middle)
    return found


def balanced_pull(hot: Floats, cold: Floats, profile: MachineProfile) -> tuple[Floats, Floats]:
    """Return (bytes to pull, seconds of the neurons) of split layers that read `hot` and `cold` bytes.

    The GPU reads hot neurons, then pulled ones, while the CPU reads the others; both are to end together. Nothing is
    pulled where that is no faster.
    """
    hot_seconds = hot / profile.gpu_bytes_per_second
    alone = np.maximum(hot_seconds, cold / profile.cpu_bytes_per_second)
    pull, beside = profile.pull_bytes_per_second, profile.cpu_beside_bytes_per_second
    if pull <= 0:
        return np.zeros_like(cold), alone
    idle = cold / beside - hot_seconds  # the GPU's, if nothing were pulled
    pulled = np.clip(idle / (1 / pull + 1 / beside), 0.0, cold)
    together = np.maximum(hot_seconds + pulled / pull, (cold - pulled) / beside)
    faster = together < alone
    return np.where(faster, pulled, 0.0), np.where(faster, together, alone)


def token_cost(
    shape: ModelShape,
    plan: Plan,
    profile: MachineProfile,
    *,
    shares: Shares | None = None,
    n_positions: float | None = None,
) -> TokenCost:
    """Return what a token costs under a plan, after n_positions others (None: half of the context)."""
    reads = Reads(shape, plan, shares, n_positions)
    layers = tuple(
        layer_cost(reads, place, profile, profile.handover(plan.handover))
        for place in layer_places(plan.units, shape.n_layers)
    )
    on_gpu = is_on_gpu(plan.units, UnitKind.HEAD)
    rate = profile.gpu_bytes_per_second if on_gpu else profile.cpu_bytes_per_second
    return TokenCost(layers, reads.head(), on_gpu, reads.head() / rate)


def layer_cost(
    reads: Reads, place: LayerPlace, profile: MachineProfile, handover_seconds: float
) -> LayerCost:
    """Return what one layer costs."""
    marks = np.array([0, place.n_hot, place.n_pull, reads.n_ff])
    hot, pull, cold = np.diff(reads.before(place, marks)).tolist()
    always = reads.always(place)
    cpu, gpu = profile.cpu_bytes_per_second, profile.gpu_bytes_per_second
    cold_rate = profile.cpu_beside_bytes_per_second if pull else cpu
    return LayerCost(
        place=place,
        always_bytes=always,
        hot_bytes=hot,
        pull_bytes=pull,
        cold_bytes=cold,
        always_seconds=always / (cpu if place.side is Side.CPU else gpu),
        gpu_seconds=hot / gpu + (pull / profile.pull_bytes_per_second if pull else 0.0),
        cpu_seconds=cold / cold_rate,
        handover_seconds=handover_seconds if place.side is Side.SPLIT else 0.0,
    )


def bound_seconds(cost: TokenCost, profile: MachineProfile) -> float:
    """Return the least time in which what a token reads can be read (docs/bench.md).

    Hot neurons are read while the CPU reads the others and the GPU pulls, at the sum of both rates, however they are
    divided; a hand-over takes LEAST_HANDOVER_SECONDS.
    """
    gpu, cpu = profile.gpu_bytes_per_second, profile.cpu_bytes_per_second
    cold = max(cpu, profile.cpu_beside_bytes_per_second + profile.pull_bytes_per_second)
    seconds = cost.head_bytes / (gpu if cost.head_on_gpu else cpu)
    for layer in cost.layers:
        if layer.place.side is Side.CPU:
            seconds += (layer.always_bytes + layer.ffn_bytes) / cpu
            continue
        seconds += layer.always_bytes / gpu
        seconds += max(layer.hot_bytes / gpu, (layer.pull_bytes + layer.cold_bytes) / cold)
        seconds += LEAST_HANDOVER_SECONDS if layer.place.side is Side.SPLIT else 0.0
    return seconds
