"""The real ReLU model with its predictors: exact, predicted, threads, steps and batches."""

from __future__ import annotations

import numpy as np
import pytest

from parity import checkpoints, real_models
from parity.closeness import relative_l2
from parity.english import english
from parity.reference import Reference, Trace
from parity.steps import bits, decode, run_chunks
from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.engine import Batch

pytestmark = pytest.mark.slow

N_TOKENS = 30
# Two float32 computations of the same sums in different orders, each within 1e-5 of the truth.
SAME = 2e-5


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    with Model.load(real_models.relu("f32"), context=64) as model:
        return english(model, N_TOKENS)


@pytest.mark.parametrize(("outtype", "tolerance"), [("f32", 1e-5), ("f16", 2e-3)])
def test_logits_equal_transformers(outtype, tolerance, tokens):
    """The checkpoint's weights are float16 numbers, so an f16 file rounds the KV cache alone."""
    want = checkpoints.torch_logits(
        checkpoints.load_checkpoint(real_models.relu_checkpoint()), tokens
    )
    with Model.load(real_models.relu(outtype), threads=2) as model:
        assert relative_l2(model.logits(tokens), want) <= tolerance
        assert relative_l2(decode(model, tokens), want) <= tolerance


@pytest.mark.parametrize("outtype", ["f16", "q4_0"])
def test_exact_and_all_passing_predictors_equal_dense_bit_for_bit(outtype, tokens):
    path = real_models.relu(outtype)
    steps, prompts = {}, {}
    settings = {"ffn": "predicted", "sparse_threshold": float("-inf")}
    for name, how in {
        "dense": {"ffn": "dense"},
        "exact": {"ffn": "exact"},
        "all_pass": settings,
    }.items():
        with Model.load(path, threads=2, **how) as model:
            steps[name] = bits(decode(model, tokens))
            prompts[name] = bits(model.logits(tokens))
            if name == "exact":
                assert 0.05 < model.stats().active_share < 0.3
    assert steps["exact"] == steps["dense"] == steps["all_pass"]
    assert prompts["exact"] == prompts["dense"] == prompts["all_pass"]


@pytest.mark.parametrize("ffn", ["exact", "predicted"])
def test_thread_counts_give_the_same_bits(ffn, tokens):
    seen = set()
    for threads in (1, 2, 4):
        with Model.load(real_models.relu("f16"), threads=threads, ffn=ffn) as model:
            seen.add((bits(decode(model, tokens[:16])), bits(model.logits(tokens))))
    assert len(seen) == 1


def test_steps_batches_and_interleaved_sequences_agree(tokens):
    path = real_models.relu("f32")
    other = tokens[::-1]
    with Model.load(path, threads=2, sequences=2, ffn="exact") as model:
        batch, other_batch = model.logits(tokens), model.logits(other)
        assert relative_l2(decode(model, tokens), batch) <= SAME
        model.engine.kv_truncate(0, 0)
        assert relative_l2(run_chunks(model, tokens, 7), batch) <= SAME
        model.engine.kv_truncate(0, 0)
        rows = [[], []]
        for i in range(0, N_TOKENS, 6):
            both = np.stack([tokens[i : i + 6], other[i : i + 6]], axis=1).ravel()
            model.engine.run(Batch(both, sequences=[0, 1] * 6, want_logits=True))
            for sequence in (0, 1):
                rows[sequence].extend(model.engine.logits()[sequence::2])
        assert relative_l2(np.stack(rows[0]), batch) <= SAME
        assert relative_l2(np.stack(rows[1]), other_batch) <= SAME


def test_predicted_steps_equal_the_reference(tokens):
    """Masks of trained predictors: some logits are near the threshold and may fall either way.

    Float32 moves a logit by some 1e-6 of its size. How much all neurons within a hundred times that matter
    together is measured by moving the threshold past them, and allowed."""
    reference = Reference.load(real_models.relu("f32"))
    masked = np.arange(N_TOKENS) > 0
    trace = Trace()
    want = reference.logits(tokens, masked=masked, trace=trace)
    near = 1e-4 * max(margin.std() for margin in trace.margins)
    lower, higher = (
        reference.logits(tokens, masked=masked, threshold=reference.config.sparse_threshold + shift)
        for shift in (-near, near)
    )
    allowed = SAME + relative_l2(lower, higher)
    assert allowed < 0.05
    assert relative_l2(want, reference.logits(tokens)) > 2 * allowed
    with Model.load(real_models.relu("f32"), threads=2, ffn="predicted") as model:
        assert relative_l2(decode(model, tokens), want) <= allowed
        stats = model.stats()
        share = np.mean([margin >= 0 for margin in trace.margins])
        guessed = (share * (N_TOKENS - 1) + 1) / N_TOKENS  # position 0 is exact
        assert stats.neurons_guessed / stats.neurons_total == pytest.approx(guessed, abs=1e-4)
        assert relative_l2(model.logits(tokens), reference.logits(tokens)) <= SAME  # a long prompt


def test_predicted_perplexity_is_near_the_exact_one(tokens):
    """The model's own measurement says x1.035 on its held-out text; never position 0 masked."""
    perplexity = {}
    for ffn in ("exact", "predicted"):
        with Model.load(real_models.relu("f16"), threads=2, ffn=ffn) as model:
            scores = model.score(english(model, 512))
            perplexity[ffn] = np.exp(-scores.mean(dtype=np.float64))
    assert 1.0 < perplexity["predicted"] / perplexity["exact"] < 1.1


def test_hot_first_order_is_the_same_function(tokens):
    with Model.load(real_models.relu("f32"), threads=2) as model:
        original = decode(model, tokens)
        share = model.stats().active_share
    with Model.load(real_models.relu_hot_first("f32"), threads=2) as model:
        assert relative_l2(decode(model, tokens), original) <= SAME
        assert model.stats().active_share == pytest.approx(share, abs=1e-5)
        assert model.metadata("powerinfer.neuron_order") == "hot_first"
