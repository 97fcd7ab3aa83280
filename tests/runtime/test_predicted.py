"""Predicted mode: which tokens the API masks, against the float64 reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parity.closeness import log_softmax
from parity.reference import Reference, Trace
from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.engine import Batch, FfnRule

# Float32 weights and activations against float64: eps x sqrt(n) x depth of logits near 1.
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def predicted(synthetic_gguf):
    with Model.load(synthetic_gguf("predictors"), threads=2, batch=32, ffn="predicted") as loaded:
        yield loaded


def tokens_of(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 293, n)


def clear_prompt(path: Path, masked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A prompt and its reference logits, such that no predictor logit is within 1e-5 of the threshold.

    Float32 moves these logits by about 1e-6; closer to the threshold that would drop or add a neuron.
    """
    reference = Reference.load(path)
    for seed in range(20):
        tokens, trace = tokens_of(masked.size, seed), Trace()
        logits = reference.logits(tokens.tolist(), masked=masked, trace=trace)
        if not masked.any() or min(np.abs(margins).min() for margins in trace.margins) >= 1e-5:
            return tokens, logits
    raise AssertionError("no clear prompt")


@pytest.mark.parametrize("n_tokens", [16, 17, 40])
def test_prompts_are_masked_only_within_the_prediction_tier(predicted, synthetic_gguf, n_tokens):
    """40 is a chunk of 32 and one of 8, which by itself would be masked."""
    masked = (np.arange(n_tokens) > 0) & (n_tokens <= 16)
    tokens, want = clear_prompt(synthetic_gguf("predictors"), masked)
    np.testing.assert_allclose(predicted.logits(tokens), want, atol=ROUNDING)


def test_generation_reads_long_prompts_exactly_and_decodes_masked(predicted, synthetic_gguf):
    tokens, want = clear_prompt(synthetic_gguf("predictors"), np.arange(44) >= 40)
    user = predicted.start_text(tokens[:40].tolist())
    for token in tokens[40:].tolist():
        assert predicted.continue_text(user, token)
    np.testing.assert_allclose(predicted.engine.logits()[0], want[-1], atol=ROUNDING)


def test_score_masks_as_decoding_does(predicted, synthetic_gguf):
    tokens, logits = clear_prompt(synthetic_gguf("predictors"), np.arange(40) > 0)
    want = log_softmax(logits)[np.arange(39), tokens[1:]]
    np.testing.assert_allclose(predicted.score(tokens), want, atol=ROUNDING)


def test_predict_all_masks_everything(synthetic_gguf):
    path = synthetic_gguf("predictors")
    tokens, want = clear_prompt(path, np.ones(40, dtype=bool))
    with Model.load(path, predict_all=True, batch=32) as model:
        np.testing.assert_allclose(model.logits(tokens), want, atol=ROUNDING)


def test_rules_of_single_tokens(predicted, synthetic_gguf):
    masked = np.arange(8) % 2 == 1
    tokens, want = clear_prompt(synthetic_gguf("predictors"), masked)
    rules = np.where(masked, FfnRule.PREDICT, FfnRule.EXACT)
    predicted.forget()
    predicted.engine.run(Batch(tokens, want_logits=True, ffn_rules=rules))
    np.testing.assert_allclose(predicted.engine.logits(), want, atol=ROUNDING)


def test_statistics(predicted):
    predicted.engine.reset_stats()
    predicted.score(tokens_of(40, seed=0))
    stats = predicted.stats()
    assert stats.n_tokens == 40
    assert stats.neurons_total == 40 * 2 * 160
    assert 0 < stats.neurons_active <= stats.neurons_guessed < stats.neurons_total
    assert stats.active_share == stats.neurons_active / stats.neurons_total
