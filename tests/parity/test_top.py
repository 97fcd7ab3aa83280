"""Sampling from the largest logits: what a step finds of them, and that a text is the one all logits give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity.closeness import log_softmax
from parity.steps import random_tokens
from parity.synthetic import Shape, random_weights, uniform, write_gguf
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.engine import Batch
from powerinfer_toolkit.runtime.sampling import Sampler, Sampling

SHAPE = Shape(n_vocab=20_000, n_ctx=256)  # more than a thread searches at a time
PROMPT = random_tokens(SHAPE.n_vocab, 30)
MOST = 256  # PI_MAX_TOP
CASES = {
    "defaults": Sampling(seed=3),
    "greedy": Sampling(temperature=0),
    "greedy, penalty": Sampling(temperature=0, repeat_penalty=1.4),
    "top 40, penalty": Sampling(top_k=40, repeat_penalty=1.3, seed=4),
    "top 40, strong penalty, all tokens": Sampling(repeat_penalty=8, repeat_last_n=-1, seed=5),
    "hot": Sampling(temperature=5, top_k=150, top_p=1, min_p=0, repeat_penalty=1.1, seed=6),
    "one": Sampling(top_k=1, repeat_penalty=2, repeat_last_n=3, seed=7),
}
ALL_LOGITS = {
    "no top-k": Sampling(top_k=0),
    "more than are found": Sampling(top_k=MOST + 1),
    "reward for repeats": Sampling(repeat_penalty=0.9),
    "greedy reward": Sampling(temperature=0, repeat_penalty=0.9),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("top") / "m.gguf"
    weights = random_weights(SHAPE, 0)
    weights["output.weight"] = weights["output.weight"] * 4  # far from flat
    for begin in (700, 15_000):  # ties
        weights["output.weight"][begin : begin + 20] = weights["output.weight"][:20]
    keys = {"powerinfer.activation": "relu"}
    write_gguf(path, SHAPE, weights, type_of=uniform(Type.F32), keys=keys)
    with Model.load(path, threads=2, sequences=2) as loaded:
        yield loaded


def text_of_all_logits(model: Model, sampling: Sampling, n: int) -> list[tuple[int, float]]:
    """The loop that copies whole rows."""
    drawn: list[tuple[int, float]] = []
    model.engine.kv_truncate(0, 0)
    with Sampler(sampling) as sampler:
        for token in PROMPT:
            sampler.accept(token)
        tokens = PROMPT
        for _ in range(n):
            want = np.arange(len(tokens)) == len(tokens) - 1
            model.engine.run(Batch(tokens, want_logits=want))
            drawn.append(sampler.sample(model.engine))
            sampler.accept(drawn[-1][0])
            tokens = [drawn[-1][0]]
    return drawn


@pytest.mark.parametrize("name", CASES | ALL_LOGITS)
def test_the_text_is_that_of_all_logits(model, name):
    sampling = (CASES | ALL_LOGITS)[name]
    if sampling.seed is None:
        sampling = Sampling(**vars(sampling) | {"seed": 1})
    want = text_of_all_logits(model, sampling, 80)
    got = list(model.generate(PROMPT, n_predict=80, sampling=sampling, ignore_eos=True))
    assert [token.id for token in got] == [token for token, _ in want]
    # Both are rounded to float32, of numbers up to 30.
    np.testing.assert_allclose([t.logprob for t in got], [p for _, p in want], atol=4e-6)


def test_what_a_draw_needs():
    for sampling in ALL_LOGITS.values():
        with Sampler(sampling) as sampler:
            assert sampler.n_top() == 0
    with Sampler(Sampling(temperature=0)) as sampler:
        assert sampler.n_top() == 1
    with Sampler(Sampling(top_k=40, repeat_penalty=1.1, repeat_last_n=4)) as sampler:
        needs = [sampler.n_top()]
        for token in (5, 5, 6, 7, 5, 8):
            sampler.accept(token)
            needs.append(sampler.n_top())
    assert needs == [40, 41, 41, 42, 43, 43, 44]


def test_the_largest_logits_of_several_rows(model):
    """Rows with all logits, some of them or none, in one step; every row is what the others do not change."""
    model.engine.kv_truncate(0, 0)
    model.engine.run(Batch(PROMPT[:6], want_logits=True))
    whole = model.engine.logits()
    model.engine.kv_truncate(0, 0)
    tops, wanted = [3, 0, 0, MOST, 70, 0], np.array([1, 1, 0, 1, 1, 1], bool)
    model.engine.run(Batch(PROMPT[:6], want_logits=wanted, want_top=tops))
    np.testing.assert_array_equal(model.engine.logits(), whole[[1, 5]])
    for row, token in enumerate(np.flatnonzero(wanted)):
        if tops[token] == 0:
            with pytest.raises(UsageError, match="all logits of this row"):
                model.engine.top(row)
            continue
        top, n = model.engine.top(row), tops[token]
        order = np.argsort(-whole[token], kind="stable")[:n]
        np.testing.assert_array_equal(top.tokens, order)
        np.testing.assert_array_equal(top.logits, whole[token, order])
        got = top.logits - top.logits[0] - top.log_sum
        np.testing.assert_allclose(got, log_softmax(whole[token])[order], atol=4e-6)
    with pytest.raises(UsageError, match="no such row"):
        model.engine.top(5)


def test_rows_of_targets_beside(model):
    """Computed rows that are not wanted move no other's result."""
    model.engine.kv_truncate(0, 0)
    targets = [4, -1, 5, 6]
    model.engine.run(Batch(PROMPT[:4], want_logits=[0, 1, 0, 1], want_top=2, targets=targets))
    first, last, scores = model.engine.top(0), model.engine.top(1), model.engine.logprobs()
    model.engine.kv_truncate(0, 0)
    model.engine.run(Batch(PROMPT[:4], want_logits=True, targets=targets))
    whole = model.engine.logits()
    assert first.tokens[0] == whole[1].argmax()
    assert last.tokens[0] == whole[3].argmax()
    np.testing.assert_array_equal(scores, model.engine.logprobs())


def test_more_rows_than_the_head_computes_at_a_time(model):
    tokens = random_tokens(SHAPE.n_vocab, 100)
    model.engine.kv_truncate(0, 0)
    model.engine.run(Batch(tokens, want_logits=True))
    want = model.engine.logits().argmax(axis=-1)
    model.engine.kv_truncate(0, 0)
    model.engine.run(Batch(tokens, want_logits=True, want_top=1))
    assert [int(model.engine.top(row).tokens[0]) for row in range(100)] == want.tolist()


def test_too_few_logits_are_refused(model):
    model.engine.kv_truncate(0, 0)
    model.engine.run(Batch(PROMPT[:1], want_logits=True, want_top=39))
    for sampling in (Sampling(), Sampling(top_k=0)):
        with Sampler(sampling) as sampler, pytest.raises(UsageError, match="39 largest logits"):
            sampler.sample(model.engine)
    with pytest.raises(UsageError, match="at most 256"):
        model.engine.run(Batch([1], want_logits=True, want_top=MOST + 1))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("n_top", [0, 1, 40])
def test_a_logit_that_is_no_finite_number_is_told(tmp_path, value, n_top):
    """One of 300, whatever a draw takes of them."""
    shape = Shape(n_ctx=64)
    weights = random_weights(shape, 0)
    weights["output.weight"][271] = value
    keys = {"powerinfer.activation": "relu"}
    path = write_gguf(tmp_path / "m.gguf", shape, weights, type_of=uniform(Type.F32), keys=keys)
    sampling = Sampling(temperature=0) if n_top == 1 else Sampling(top_k=n_top)
    with Model.load(path, threads=1) as model, Sampler(sampling) as sampler:
        assert sampler.n_top() == n_top
        model.engine.run(Batch([5], want_logits=True, want_top=n_top))
        with pytest.raises(PiError, match="no finite number"):
            sampler.sample(model.engine)
