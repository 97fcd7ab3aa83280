"""Sums of loss parts and neuron activity: over the backward passes of a step, then over the steps of a log line."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from powerinfer_toolkit.errors import PiError

Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StepReading:
    """Means over the tokens of one optimiser step, all processes together."""

    ce: float
    kl: float
    penalty_by_layer: list[float]
    active_by_layer: list[float]

    @property
    def zero_share(self) -> float:
        """Share of h that is zero, over all layers."""
        return 1 - sum(self.active_by_layer) / len(self.active_by_layer)

    @property
    def penalty(self) -> float:
        """The sparsity term without its weight."""
        return sum(self.penalty_by_layer) / len(self.penalty_by_layer)

    def check(self, step: int) -> None:
        """Stop where something is not a number, at the first layer that shows it. Raises PiError."""
        for layer, penalty in enumerate(self.penalty_by_layer):
            if not math.isfinite(penalty):
                raise _not_finite(f"the FFN of layer {layer}", step)
        for name, value in (("cross-entropy", self.ce), ("KL divergence", self.kl)):
            if not math.isfinite(value):
                raise _not_finite(f"the {name}, behind the last layer,", step)


def _not_finite(what: str, step: int) -> PiError:
    return PiError(
        f"step {step}: {what} is not finite",
        hint="lower learning_rate, or use a lower max_grad_norm; the last checkpoint is from before",
    )


def check_gradients(parameters: list[tuple[str, Tensor]], step: int) -> None:
    """Stop before an update that would spoil the weights. Raises PiError naming the first bad gradient."""
    found = [(name, p.grad) for name, p in parameters if p.grad is not None]
    norms = torch._foreach_norm([gradient for _, gradient in found])
    if not bool(torch.isfinite(torch.stack(norms)).all()):
        bad = next(name for (name, _), n in zip(found, norms, strict=True) if not n.isfinite())
        raise _not_finite(f"the gradient of {bad}", step)


class Meter:
    """Collects what TrainingForward returns."""

    def __init__(self) -> None:
        self._step: Tensor | None = None
        self._passes = 0
        self._readings: list[StepReading] = []
        self._since = time.perf_counter()
        self._tokens = 0

    def add(self, parts: dict[str, Tensor], n_tokens: int) -> None:
        """Take one backward pass of this process."""
        losses = torch.stack((parts["ce"], parts["kl"])).detach().double()
        vector = torch.cat((losses, parts["penalty"].double(), parts["active"].double()))
        self._step = vector if self._step is None else self._step + vector
        self._passes += 1
        self._tokens += n_tokens

    def end_step(self, mean_over_processes: Reduce) -> StepReading:
        """Return the step's means."""
        assert self._step is not None
        ce, kl, *layers = mean_over_processes(self._step / self._passes).tolist()
        self._step, self._passes = None, 0
        n_layers = len(layers) // 2
        reading = StepReading(ce, kl, layers[:n_layers], layers[n_layers:])
        self._readings.append(reading)
        return reading

    def log(self, n_processes: int) -> dict[str, float]:
        """Return means since the last call, for one log line."""
        readings, self._readings = self._readings, []
        seconds, self._since = time.perf_counter() - self._since, time.perf_counter()
        tokens, self._tokens = self._tokens * n_processes, 0
        if not readings:
            return {}
        n = len(readings)
        line = {
            "loss_ce": sum(r.ce for r in readings) / n,
            "loss_kl": sum(r.kl for r in readings) / n,
            "loss_sparsity": sum(r.penalty for r in readings) / n,
            "zero_share": sum(r.zero_share for r in readings) / n,
            "tokens_per_second": tokens / seconds,
        }
        for layer, active in enumerate(readings[-1].active_by_layer):
            line[f"zero_share/layer_{layer:02}"] = 1 - active
        return line
