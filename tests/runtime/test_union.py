"""Steps of 2 to 16 tokens: every token keeps its own mask, and gets what it gets alone (about 4 s)."""

from __future__ import annotations

import numpy as np
import pytest

from parity.closeness import relative_l2
from parity.reference import Reference, Trace
from parity.steps import bits, run_chunks
from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.engine import Batch, FfnRule

# Float32 sums in different orders: eps x sqrt(n) x depth of logits near 1.
ROUNDING = 2e-5
SIZES = (2, 3, 5, 8, 15, 16)
N_TOKENS = 48


@pytest.fixture(scope="module")
def path(synthetic_gguf):
    return synthetic_gguf("predictors")


@pytest.fixture(scope="module")
def mixed(path):
    """Tokens and rules of which half are masked, with no predictor logit within 1e-5 of the threshold.

    Float32 moves these logits by about 1e-6; closer to the threshold that would drop or add a neuron.
    """
    reference = Reference.load(path)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        tokens, masked = rng.integers(3, 293, N_TOKENS), rng.random(N_TOKENS) < 0.5
        masked[0] = False
        trace = Trace()
        reference.logits(tokens.tolist(), masked=masked, trace=trace)
        if min(np.abs(margins).min() for margins in trace.margins) >= 1e-5:
            return tokens, np.where(masked, FfnRule.PREDICT, FfnRule.EXACT)
    raise AssertionError("no clear tokens")


def in_steps(model, tokens, rules, size):
    """Logits, what fired, and the counters of a text in steps of `size` tokens."""
    model.forget()
    model.engine.reset_stats()
    logits, fired = [], []
    for begin in range(0, len(tokens), size):
        part = slice(begin, begin + size)
        model.engine.run(Batch(tokens[part], ffn_rules=rules[part], want_logits=True))
        logits.append(model.engine.logits())
        fired.append(model.engine.fired())
    return np.concatenate(logits), np.concatenate(fired), model.stats()


@pytest.mark.parametrize("threads", [1, 3])
def test_every_token_keeps_its_mask(path, mixed, threads):
    with Model.load(path, threads=threads, ffn="predicted") as model:
        model.engine.record_fired(True)
        want, want_fired, want_stats = in_steps(model, *mixed, 1)
        masked = mixed[1] == FfnRule.PREDICT
        assert want_fired[masked].mean() < 0.9 * want_fired[~masked].mean()  # masks matter
        for size in SIZES:
            logits, fired, stats = in_steps(model, *mixed, size)
            np.testing.assert_allclose(logits, want, atol=ROUNDING)
            np.testing.assert_array_equal(fired, want_fired)
            for name in ("neurons_total", "neurons_guessed", "neurons_active"):
                assert getattr(stats, name) == getattr(want_stats, name)


def test_bits_do_not_depend_on_threads(path, mixed):
    seen = {size: set() for size in SIZES}
    for threads in (1, 2, 3, 5):
        with Model.load(path, threads=threads, ffn="predicted") as model:
            model.engine.record_fired(True)
            for size in SIZES:
                seen[size].add(bits(in_steps(model, *mixed, size)[0]))
    assert all(len(bytes_of) == 1 for bytes_of in seen.values())


@pytest.mark.parametrize("size", SIZES)
def test_exact_steps_lose_nothing(path, mixed, size):
    tokens = mixed[0].tolist()
    with Model.load(path, threads=2, ffn="dense") as model:
        want = run_chunks(model, tokens, size)
    with Model.load(path, threads=2, ffn="exact") as model:
        np.testing.assert_allclose(run_chunks(model, tokens, size), want, atol=ROUNDING)
        assert model.stats().active_share < 0.7


def test_sequences_in_one_step_do_not_mix(path, mixed):
    tokens, rules = mixed[0][:8], mixed[1][:8]
    with Model.load(path, threads=2, ffn="predicted", sequences=4) as model:
        model.engine.record_fired(True)
        want, _, _ = in_steps(model, tokens, rules, 1)
        for sequence in range(4):
            model.engine.kv_truncate(sequence, 0)
        for i in range(8):
            four = Batch(
                [tokens[i]] * 4, sequences=range(4), ffn_rules=[rules[i]] * 4, want_logits=True
            )
            model.engine.run(four)
            assert relative_l2(model.engine.logits(), np.tile(want[i], (4, 1))) <= ROUNDING
