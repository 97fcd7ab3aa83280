"""What must be equal bit for bit: thread counts, exact and dense, predictors that let everything through."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type

from parity.steps import bits, decode, random_tokens, run_chunks
from parity.synthetic import Shape, random_weights, uniform, write_gguf
from powerinfer_toolkit.runtime import Model, native_lib
from powerinfer_toolkit.runtime.sampling import Sampling

SHAPE = Shape(n_layers=3, n_ff=1037, ranks=(32, 64, 32))
RELU = {"powerinfer.activation": "relu"}
PROMPT = random_tokens(SHAPE.n_vocab, 70)
TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1]


@pytest.fixture(scope="module", params=TYPES, ids=lambda t: t.name)
def path(request, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("determinism") / "m.gguf"
    weights = random_weights(SHAPE, 0)
    return write_gguf(out, SHAPE, weights, type_of=uniform(request.param), keys=RELU)


def test_exact_equals_dense(path):
    """Skipping zeros changes no bit: down_t is summed in an order that does not depend on them."""
    with Model.load(path, ffn="dense") as dense, Model.load(path, ffn="exact") as exact:
        assert bits(decode(exact, PROMPT)) == bits(decode(dense, PROMPT))
        for n in (2, 5, 16, 70):
            assert bits(exact.logits(PROMPT[:n])) == bits(dense.logits(PROMPT[:n]))
        assert dense.stats().active_share == 1
        assert 0.3 < exact.stats().active_share < 0.7  # random gates: half of them are open


@pytest.mark.parametrize("threshold", [-1e30, float("-inf")])
def test_predictors_that_pass_everything_equal_dense(threshold, path):
    passing = {"ffn": "predicted", "sparse_threshold": threshold}
    with Model.load(path, ffn="dense") as dense, Model.load(path, **passing) as predicted:
        assert bits(decode(predicted, PROMPT)) == bits(decode(dense, PROMPT))
        assert predicted.stats().neurons_guessed == predicted.stats().neurons_total


@pytest.mark.parametrize("type_", [Type.F16, Type.Q4_0], ids=lambda t: t.name)
def test_all_zero_predictors_equal_dense(type_, tmp_path):
    """A logit that equals the threshold is active: so a file without predictors is written for PowerInfer."""
    weights = random_weights(SHAPE, 0)
    for name in weights:
        if ".fc1." in name or ".fc2." in name:
            weights[name] *= 0
    path = write_gguf(
        tmp_path / "m.gguf", SHAPE, weights, type_of=uniform(type_), minimal=True, magic=b"PWRI"
    )
    with Model.load(path, ffn="dense") as dense, Model.load(path, predict_all=True) as masked:
        assert bits(decode(masked, PROMPT)) == bits(decode(dense, PROMPT))


def test_prompts_beyond_the_prediction_tier_are_exact(path):
    with Model.load(path, ffn="exact") as exact, Model.load(path, ffn="predicted") as predicted:
        limit = predicted.plan.predicted_tokens
        assert bits(predicted.logits(PROMPT[: limit + 1])) == bits(
            exact.logits(PROMPT[: limit + 1])
        )
        assert bits(predicted.logits(PROMPT[:limit])) != bits(exact.logits(PROMPT[:limit]))
        # in small batches too: the prompt as a whole decides
    with Model.load(path, ffn="exact", batch=8) as exact:
        want = bits(exact.logits(PROMPT[: limit + 1]))
    with Model.load(path, ffn="predicted", batch=8) as predicted:
        assert bits(predicted.logits(PROMPT[: limit + 1])) == want


@pytest.mark.parametrize("ffn", ["dense", "exact", "predicted"])
def test_thread_counts(ffn, path):
    seen = []
    for threads in (1, 2, 4):
        with Model.load(path, ffn=ffn, threads=threads) as model:
            assert model.stats().n_threads == threads
            step = decode(model, PROMPT[:20])
            five = run_chunks(model, PROMPT[20:35], 5)
            seen.append((bits(model.logits(PROMPT)), bits(step), bits(five)))
    assert seen[0] == seen[1] == seen[2]


def test_a_seed_gives_the_same_text_on_any_thread_count(path):
    texts = set()
    for threads in (1, 2, 4):
        with Model.load(path, threads=threads) as model:
            sampling = Sampling(seed=7, temperature=1.0, repeat_penalty=1.1)
            text = model.generate(PROMPT[:9], n_predict=32, sampling=sampling, ignore_eos=True)
            texts.add(tuple((token.id, token.logprob) for token in text))
    assert len(texts) == 1
    assert len(texts.pop()) == 32


def test_another_seed_gives_another_text(path):
    with Model.load(path) as model:
        texts = [
            [t.id for t in model.generate(PROMPT[:9], n_predict=32, sampling=Sampling(seed=seed))]
            for seed in (1, 2)
        ]
    assert texts[0] != texts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "isa", [name for name, usable in native_lib.instruction_sets() if usable and name != "scalar"]
)
def test_a_later_token_changes_none_before(isa, smollm2_gguf):
    """What a step computes together is no token's business: real values, whose outliers would show in a shared scale."""
    with Model.load(smollm2_gguf, threads=1, isa=isa) as model:
        prompt = random_tokens(model.config.n_vocab, 100)
        other = [*prompt[:-1], (prompt[-1] + 4000) % model.config.n_vocab]
        assert bits(model.logits(prompt)[:-1]) == bits(model.logits(other)[:-1])
