"""The weight of the sparsity term, step by step: steered to a zero share, or read from a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from powerinfer_toolkit.convert.relufy.settings import RelufySettings, Schedule, Stage, Variant

EMA_DECAY = 0.9  # of the zero share before the target starts to rise


class Steering(Protocol):
    """`weight` for the next step's sparsity term; `target` is None where no zero share is aimed at."""

    weight: float
    target: float | None

    def update(self, zero_share: float) -> None:
        """Take the zero share of the step that has just been made."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""


def half_sine(x: float) -> float:
    """Rise from 0 to 1 between x = 0 and 1, level at both ends."""
    return (1 - math.cos(math.pi * min(max(x, 0.0), 1.0))) / 2


class AdaptiveSteering:
    """Closed loop: the weight moves by a fixed factor toward a target that rises on a half-sine.

    ReMoE (arXiv 2412.14711) steers a sparsity coefficient this way. Until `ramp_start` the weight is 0 and
    the zero share is only watched; the target rises from there to `goal` at `ramp_end`; from `freeze` on
    the weight stays. The three are shares of `total_steps`.
    """

    def __init__(
        self,
        goal: float,
        total_steps: int,
        *,
        init: float,
        factor: float,
        ramp_start: float,
        ramp_end: float,
        freeze: float,
    ) -> None:
        self.goal, self.total_steps = goal, total_steps
        self.init, self.factor = init, factor
        self.ramp_start, self.ramp_end, self.freeze = ramp_start, ramp_end, freeze
        self.step = 0
        self.start: float | None = None  # zero share from which the target rises
        self.weight = 0.0 if ramp_start > 0 else init
        self.target: float | None = None

    def update(self, zero_share: float) -> None:
        """Take the zero share of the step that has just been made."""
        self.step += 1
        progress = self.step / self.total_steps
        if self.start is None:
            self.start = zero_share
        if progress < self.ramp_start:
            self.start = EMA_DECAY * self.start + (1 - EMA_DECAY) * zero_share
            return
        ramp = (progress - self.ramp_start) / (self.ramp_end - self.ramp_start)
        self.target = self.start + (self.goal - self.start) * half_sine(ramp)
        if progress >= self.freeze:
            return
        moved = self.weight * self.factor if zero_share < self.target else self.weight / self.factor
        self.weight = max(moved, self.init)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        names = ("step", "start", "weight", "target")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


class StagedSteering:
    """Open loop: ProSparse's table (arXiv 2402.13516); in each stage the weight goes to that stage's peak.

    The first stage is constant, later ones rise on a half-sine from the peak before; after the last the
    weight stays. An empty table means no sparsity term.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = list(stages)
        self.target: float | None = None
        self.step = 0
        self.weight = self._weight_at(0)

    def update(self, zero_share: float) -> None:
        """Take note of one more step; the zero share plays no part."""
        self.step += 1
        self.weight = self._weight_at(self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to hold."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.step = state["step"]
        self.weight = self._weight_at(self.step)

    def _weight_at(self, step: int) -> float:
        before, begin = (self.stages[0].peak if self.stages else 0.0), 0
        for stage in self.stages:
            if step < stage.until_step:
                share = half_sine((step - begin) / (stage.until_step - begin))
                return before + (stage.peak - before) * share
            before, begin = stage.peak, stage.until_step
        return before


def steering_for(settings: RelufySettings, total_steps: int) -> Steering:
    """Return the steering that the settings ask for; a dense control has no sparsity term."""
    if settings.variant == Variant.DENSE:
        return StagedSteering([])
    if settings.sparsity_schedule == Schedule.STAGES or settings.sparsity_target is None:
        return StagedSteering(settings.sparsity_stages)
    return AdaptiveSteering(
        settings.sparsity_target,
        total_steps,
        init=settings.sparsity_lambda_init,
        factor=settings.sparsity_lambda_step,
        ramp_start=settings.sparsity_ramp_start,
        ramp_end=settings.sparsity_ramp_end,
        freeze=settings.sparsity_freeze,
    )
