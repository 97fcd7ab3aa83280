"""Steering: a toy whose zero share answers to the weight reaches its target; tables give their peaks."""

from __future__ import annotations

import json
import math

import pytest

from powerinfer_toolkit.convert.relufy.settings import RelufySettings, Stage
from powerinfer_toolkit.convert.relufy.steering import (
    AdaptiveSteering,
    StagedSteering,
    half_sine,
    steering_for,
)

STEPS = 600


def adaptive(goal=0.88, **changes) -> AdaptiveSteering:
    shape = {"init": 2e-5, "factor": 1.04, "ramp_start": 0.12, "ramp_end": 0.7, "freeze": 0.8}
    return AdaptiveSteering(goal, STEPS, **shape | changes)


class Toy:
    """Zero share follows 0.65 + 0.06 * log(1 + weight / 2e-5), one tenth of the way a step."""

    def __init__(self) -> None:
        self.share = 0.65

    def step(self, weight: float) -> float:
        wanted = min(0.65 + 0.06 * math.log1p(weight / 2e-5), 1.0)
        self.share += 0.1 * (wanted - self.share)
        return self.share


def run(steering: AdaptiveSteering, toy: Toy, n_steps: int) -> list[float]:
    weights = []
    for _ in range(n_steps):
        weights.append(steering.weight)
        steering.update(toy.step(steering.weight))
    return weights


def test_the_target_is_reached():
    toy, steering = Toy(), adaptive()
    weights = run(steering, toy, STEPS)
    assert set(weights[: int(0.12 * STEPS)]) == {0.0}
    assert steering.start == pytest.approx(0.65)
    # One step moves the weight by 4%, which the toy answers with 0.06 * 0.04 = 0.0024, ten steps late.
    assert toy.share == pytest.approx(0.88, abs=0.025)
    assert len(set(weights[int(0.8 * STEPS) + 1 :])) == 1


def test_the_weight_never_falls_below_the_first():
    toy, steering = Toy(), adaptive(goal=0.5)
    assert min(run(steering, toy, STEPS)[int(0.12 * STEPS) + 1 :]) == 2e-5


def test_a_continued_run_steers_alike():
    toy, steering = Toy(), adaptive()
    run(steering, toy, 200)
    state = json.loads(json.dumps(steering.state_dict()))
    other, other_toy = adaptive(), Toy()
    other.load_state_dict(state)
    other_toy.share = toy.share
    assert run(steering, toy, 300) == run(other, other_toy, 300)


def test_stages_follow_the_table():
    stages = [Stage(0.0, 10), Stage(0.4, 20), Stage(0.2, 40)]
    steering = StagedSteering(stages)
    weights = []
    for _ in range(50):
        weights.append(steering.weight)
        steering.update(0.5)
    assert weights[:11] == [0.0] * 11
    assert weights[15] == pytest.approx(0.2)
    assert weights[20] == pytest.approx(0.4)
    assert weights[30] == pytest.approx(0.3)
    assert weights[40:] == [0.2] * 10
    other = StagedSteering(stages)
    other.load_state_dict({"step": 15})
    assert other.weight == weights[15]


def test_half_sine_is_level_at_its_ends():
    assert [half_sine(x) for x in (-1, 0, 0.5, 1, 2)] == pytest.approx([0, 0, 0.5, 1, 1])
    assert half_sine(0.01) < 0.001


def test_without_a_target_there_is_no_weight():
    steering = steering_for(RelufySettings(), 10)
    steering.update(0.5)
    assert steering.weight == 0
    assert steering.target is None
