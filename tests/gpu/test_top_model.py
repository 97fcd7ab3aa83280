"""Whole models on the device that find the largest logits there: texts are those that all logits give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from gpu.models import WORDY, Synth, opened, options
from powerinfer_toolkit.runtime.engine import Batch
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.plan.plan import Placement, Plan, UnitKind
from powerinfer_toolkit.runtime.sampling import Sampler, Sampling

N_TOKENS = 10
SAMPLINGS = {
    "greedy": Sampling(temperature=0, seed=0),
    "top 40, penalty": Sampling(top_k=40, repeat_penalty=1.3, seed=1),
    "hot, greater penalty": Sampling(
        temperature=2, top_p=1, min_p=0, repeat_penalty=3, repeat_last_n=-1, seed=2
    ),
}


@pytest.fixture(scope="module")
def model(synth: Synth) -> Iterator[Model]:
    with opened(synth("f16", shape=WORDY.name), options("exact", sequences=2)) as loaded:
        yield loaded


def prompt(n: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(n).integers(3, WORDY.n_vocab, n).tolist()
    return drawn


def text(model: Model, sampling: Sampling, *, whole: bool) -> list[tuple[int, float]]:
    """Tokens and log-probabilities, drawn from all logits or from those that the sampler needs."""
    model.engine.kv_truncate(0, 0)
    tokens, drawn = prompt(12), []
    with Sampler(sampling) as sampler:
        for _ in range(N_TOKENS):
            for token in tokens:
                sampler.accept(token)
            want = np.arange(len(tokens)) == len(tokens) - 1
            n_top = 0 if whole else sampler.n_top()
            assert whole or n_top > 0
            model.engine.run(Batch(tokens, want_logits=want, want_top=n_top))
            drawn.append(sampler.sample(model.engine))
            tokens = [drawn[-1][0]]
    return drawn


def check(model: Model, sampling: Sampling) -> None:
    want, got = text(model, sampling, whole=True), text(model, sampling, whole=False)
    assert [token for token, _ in got] == [token for token, _ in want]
    # A sum in float32 beside one in float64, and numbers up to 10 rounded to float32.
    np.testing.assert_allclose([p for _, p in got], [p for _, p in want], atol=4e-6)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_is_that_of_all_logits(model: Model, name: str) -> None:
    check(model, SAMPLINGS[name])


def test_a_head_on_the_cpu(synth: Synth) -> None:
    def change(plan: Plan) -> Plan:
        units = (
            dataclasses.replace(u, placement=Placement.CPU) if u.kind is UnitKind.HEAD else u
            for u in plan.units
        )
        return dataclasses.replace(plan, units=tuple(units))

    with opened(synth("f16", shape=WORDY.name), options("exact"), change) as split:
        check(split, SAMPLINGS["top 40, penalty"])


def test_rows_with_all_or_some_logits(model: Model) -> None:
    """The first step of a shape is queued, the second recorded, the third replayed."""
    tops, wanted = [256, 0, 1, 70], np.array([1, 1, 0, 1], bool)
    for _ in range(3):
        model.engine.kv_truncate(0, 0)
        model.engine.run(Batch(prompt(4), want_logits=True))
        whole = model.engine.logits()
        model.engine.kv_truncate(0, 0)
        model.engine.run(Batch(prompt(4), want_logits=wanted, want_top=tops))
        np.testing.assert_array_equal(model.engine.logits(), whole[[1]])
        for row, token in ((0, 0), (2, 3)):
            order = np.argsort(-whole[token], kind="stable")[: tops[token]]
            np.testing.assert_array_equal(model.engine.top(row).tokens, order)
            np.testing.assert_array_equal(model.engine.top(row).logits, whole[token, order])


def test_steps_replay_whatever_the_penalty_needs(model: Model) -> None:
    """Numbers of logits are rounded up to a few: a graph for each of these."""

    def launched(n_top: int) -> bool:
        before = model.stats().device_graph_launches
        model.engine.kv_truncate(0, 0)
        model.engine.run(Batch([5], want_logits=True, want_top=n_top))
        assert len(model.engine.top().tokens) == n_top
        return model.stats().device_graph_launches > before

    for first, others in ((2, (3, 40, 64)), (65, (104, 128)), (200, (256, 193))):
        launched(first)
        assert all(launched(n) for n in others)


def test_a_long_prompt_wants_few_logits(model: Model) -> None:
    """Steps that no graph is made of, and more rows than the head computes at a time."""
    for n in (64, 40):
        model.engine.kv_truncate(0, 0)
        model.engine.run(Batch(prompt(n), want_logits=True, want_top=2))
        tops = [model.engine.top(row).tokens[0] for row in range(n)]
        model.engine.kv_truncate(0, 0)
        model.engine.run(Batch(prompt(n), want_logits=True))
        np.testing.assert_array_equal(tops, model.engine.logits().argmax(axis=-1))
