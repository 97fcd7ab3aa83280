"""The search for a split: against trying everything, and what holds for any budget (about 6 s)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from powerinfer_toolkit.runtime.plan.split import Problem, solve

HANDOVER = 0.5


def random_problem(seed: int, n_layers: int, n_steps: int) -> Problem:
    """Layers of different sizes whose neurons gain less and less; a GPU 5 to 50 times as fast as the CPU."""
    rng = np.random.default_rng(seed)
    speed = rng.uniform(5, 50)
    base, neurons = rng.uniform(0.5, 3, n_layers), rng.uniform(2, 10, n_layers)
    sizes = np.arange(n_steps) / n_steps * neurons[:, None]
    rates = -np.sort(-rng.uniform(0, 1, (n_layers, n_steps)), axis=1) * neurons[:, None]
    hot = np.pad(np.cumsum(rates, axis=1), ((0, 0), (1, 0)))[:, :-1]
    every = rates.sum(axis=1)
    cold = every[:, None] - hot
    return Problem(
        budget_bytes=rng.uniform(0.2, 1.0) * float((base + neurons).sum()),
        cpu_seconds=base + every,
        gpu_seconds=(base + every) / speed,
        gpu_bytes=base + neurons,
        split_seconds=base[:, None] / speed + np.maximum(hot / speed, cold) + HANDOVER,
        split_bytes=base[:, None] + sizes,
    )


def least(problem: Problem) -> float | None:
    """The least time of all placements."""
    seconds = np.column_stack([problem.split_seconds, problem.gpu_seconds])
    sizes = np.column_stack([problem.split_bytes, problem.gpu_bytes])
    best = []
    for n_cpu in range(problem.n_layers if problem.may_leave else 1):
        time = sum(np.ix_(*seconds[n_cpu:])) + problem.cpu_seconds[:n_cpu].sum()
        fits = sum(np.ix_(*sizes[n_cpu:])) <= problem.budget_bytes
        best += [float(time[fits].min())] if fits.any() else []
    return min(best, default=None)


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_much_faster(seed):
    """Within 2%: what filling by the best rate can miss is a part of one step, here 1/48 of a layer."""
    problem = random_problem(seed, n_layers=3, n_steps=48)
    found, best = solve(problem), least(problem)
    assert (found is None) == (best is None)
    if found is not None:
        assert best <= found.seconds + 1e-9
        assert found.seconds <= 1.02 * best
        assert cost(problem, found) == pytest.approx((found.seconds, found.n_bytes))
        assert found.n_bytes <= problem.budget_bytes


def cost(problem: Problem, found) -> tuple[float, float]:
    split = np.arange(problem.n_layers) >= found.n_cpu
    split &= ~found.whole
    rows = np.flatnonzero(split)
    seconds = problem.cpu_seconds[: found.n_cpu].sum() + problem.gpu_seconds[found.whole].sum()
    seconds += problem.split_seconds[rows, found.steps[rows]].sum()
    n_bytes = (
        problem.gpu_bytes[found.whole].sum() + problem.split_bytes[rows, found.steps[rows]].sum()
    )
    return float(seconds), float(n_bytes)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("n_layers", [4, 40])
def test_more_memory_is_never_slower(seed, n_layers):
    problem = random_problem(seed, n_layers=n_layers, n_steps=20)
    before = np.inf
    for share in np.linspace(0.05, 1.05, 30):
        budget = share * float(problem.gpu_bytes.sum())
        found = solve(dataclasses.replace(problem, budget_bytes=budget))
        if found is not None:
            assert found.n_bytes <= budget
            assert found.seconds <= before * (1 + 2e-3)
            before = min(before, found.seconds)


def test_a_layer_is_filled_for_its_hand_over():
    """Two equal layers and room for one and a half: whole and a half saves a hand-over over twice three quarters."""
    steps = np.arange(10) / 10
    problem = Problem(
        budget_bytes=3.0,
        cpu_seconds=np.full(2, 3.0),
        gpu_seconds=np.full(2, 0.1),
        gpu_bytes=np.full(2, 2.0),
        split_seconds=np.tile(2.0 * (1 - steps) + 0.1 + HANDOVER, (2, 1)),
        split_bytes=np.tile(1.0 + steps, (2, 1)),
    )
    found = solve(problem)
    assert found.n_cpu == 0
    assert sorted(found.whole) == [False, True]
    assert found.seconds == pytest.approx(0.1 + 2.0 + 0.1 + HANDOVER)


def test_the_first_neuron_off_a_layer_costs_a_hand_over():
    problem = random_problem(1, n_layers=4, n_steps=16)
    everything = float(problem.gpu_bytes.sum())
    found = solve(dataclasses.replace(problem, budget_bytes=everything))
    assert found.whole.all()
    one_less = solve(dataclasses.replace(problem, budget_bytes=everything - 1e-6))
    assert one_less.whole.sum() == 3
    # Less what the GPU is spared: here it is 5 times as fast as the CPU, or more.
    assert one_less.seconds > found.seconds + 0.5 * HANDOVER


def test_whole_layers_alone():
    problem = dataclasses.replace(random_problem(3, n_layers=5, n_steps=8), may_split=False)
    problem = dataclasses.replace(problem, budget_bytes=float(problem.gpu_bytes[3:].sum()))
    found = solve(problem)
    assert found.n_cpu == 3
    assert found.whole.tolist() == [False, False, False, True, True]
    assert solve(dataclasses.replace(problem, budget_bytes=0.1)) is None
    assert solve(dataclasses.replace(problem, may_leave=False)) is None


def test_a_waiting_cpu_gets_its_neurons_back():
    """Where the GPU would be the one that is waited for, neurons stay on the CPU although they fit."""
    steps = np.arange(10) / 10
    problem = Problem(
        budget_bytes=100.0,
        cpu_seconds=np.array([2.0]),
        gpu_seconds=np.array([1.1]),
        gpu_bytes=np.array([2.0]),
        split_seconds=np.maximum(steps, 1 - steps)[None] + 0.1,
        split_bytes=(1 + steps)[None],
    )
    found = solve(problem)
    assert found.steps.tolist() == [5]
    assert found.seconds == pytest.approx(0.6)
