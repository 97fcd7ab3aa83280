"""Steps, batches, interleaved sequences, tree masks and the KV cache: different ways to the same logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity.closeness import relative_l2
from parity.predictors import clear_masks
from parity.reference import Reference
from parity.steps import Logits, bits, decode, random_tokens, run_chunks
from parity.synthetic import Shape, random_weights, uniform, write_gguf
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.engine import Batch, FfnRule
from powerinfer_toolkit.runtime.sampling import Sampling

SHAPE = Shape(n_ff=163, ranks=(32, 64), n_ctx=256)
PROMPT = random_tokens(SHAPE.n_vocab, 150)  # several KV pages of 32
OTHERS = [random_tokens(SHAPE.n_vocab, n, seed=n) for n in (41, 7, 66)]
# Different ways sum the same float32 terms in different orders: eps x sqrt(n) x depth, some 1e-6 here.
SAME = 1e-5
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """F32, so that nothing but the order of sums differs; masks clear of the threshold on PROMPT."""
    folder = tmp_path_factory.mktemp("sequences")
    weights = random_weights(SHAPE, 0)
    masked = np.arange(len(PROMPT)) > 0
    float32 = uniform(Type.F32)
    clear_masks(folder / "scratch", SHAPE, weights, float32, PROMPT, masked, margin=2e-3)
    keys = {"powerinfer.activation": "relu"}
    return write_gguf(folder / "m.gguf", SHAPE, weights, type_of=float32, keys=keys)


@pytest.fixture(scope="module")
def want(path) -> Logits:
    return Reference.load(path).logits(PROMPT)


@pytest.fixture
def model(path):
    with Model.load(path, threads=2, sequences=4, ffn="exact") as model:
        yield model


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 16, 17, 31, 32, 33, 64, 65, 150])
def test_chunks(chunk, model, want):
    assert relative_l2(run_chunks(model, PROMPT, chunk), want) <= SAME


@pytest.mark.parametrize("batch", [1, 7, 32, 150, 512])
def test_prompts_longer_than_the_batch(batch, path, want):
    with Model.load(path, batch=batch) as model:
        assert relative_l2(model.logits(PROMPT), want) <= SAME


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 16, 17, 150])
def test_chunks_of_masked_tokens(chunk, path):
    """PI_RULE_PREDICT masks a token in a step of any size, but never position 0."""
    masked = np.arange(len(PROMPT)) > 0
    predicted = Reference.load(path).logits(PROMPT, masked=masked)
    with Model.load(path, threads=2, ffn="predicted") as model:
        got = run_chunks(model, PROMPT, chunk, rule=FfnRule.PREDICT)
    assert relative_l2(got, predicted) <= SAME


def test_the_tier_decides_where_no_rule_does(path, want):
    """Steps beyond the prediction tier are exact, smaller ones masked."""
    masked = np.arange(len(PROMPT)) > 0
    predicted = Reference.load(path).logits(PROMPT[:96], masked=masked[:96])
    with Model.load(path, threads=2, ffn="predicted") as model:
        tier = model.plan.predicted_tokens
        assert tier == 16
        assert relative_l2(run_chunks(model, PROMPT[:96], tier), predicted) <= SAME
        model.engine.kv_truncate(0, 0)
        run_chunks(model, PROMPT[:85], tier + 1)
        assert relative_l2(run_chunks(model, PROMPT[85:119], tier + 1), want[85:119]) <= SAME


def test_rules_differ_within_one_step(path):
    """Each token follows its own rule, whatever its neighbours do."""
    masked = np.arange(len(PROMPT)) > 0
    reference = Reference.load(path)
    masked_only_late = masked & (np.arange(len(PROMPT)) >= 140)
    want = reference.logits(PROMPT, masked=masked_only_late)
    rules = np.where(masked_only_late, FfnRule.PREDICT, FfnRule.EXACT)
    with Model.load(path, threads=2, ffn="predicted") as model:
        model.engine.run(Batch(PROMPT, want_logits=True, ffn_rules=rules))
        got = model.engine.logits()
    near_threshold_late = 0.02  # these masks see another stream than the one that clear_masks knew
    assert relative_l2(got[:140], want[:140]) <= SAME
    assert relative_l2(got, want) <= near_threshold_late
    assert relative_l2(reference.logits(PROMPT)[140:], want[140:]) > 10 * near_threshold_late


def test_scores_are_log_probabilities_of_decoding(path):
    reference = Reference.load(path)
    for ffn, masked in (("exact", None), ("predicted", np.arange(len(PROMPT)) > 0)):
        logits = reference.logits(PROMPT, masked=masked)
        peak = logits.max(axis=-1, keepdims=True)
        logprobs = logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))
        expected = logprobs[np.arange(len(PROMPT) - 1), PROMPT[1:]]
        with Model.load(path, ffn=ffn) as model:
            np.testing.assert_allclose(model.score(PROMPT), expected, atol=1e-4)


def interleaved(sequences: list[int], rng: np.random.Generator) -> list[int]:
    """Row numbers in a random order that keeps each sequence's own rows in order."""
    rows = {s: iter([i for i, other in enumerate(sequences) if other == s]) for s in sequences}
    return [next(rows[s]) for s in rng.permutation(sequences).tolist()]


def test_interleaved_sequences(model, want):
    """Four sequences in shared steps of ever changing make-up."""
    texts = [PROMPT, *OTHERS]
    expected = [want, *(model.logits(text) for text in OTHERS)]
    model.engine.kv_truncate(0, 0)
    rng = np.random.default_rng(0)
    got: list[list[np.ndarray]] = [[] for _ in texts]
    left = [list(text) for text in texts]
    while any(left):
        sizes = [rng.integers(0, 9) for _ in texts]
        sequences = [s for s, n in enumerate(sizes) for _ in left[s][:n]]
        tokens = [token for s, n in enumerate(sizes) for token in left[s][:n]]
        left = [text[n:] for text, n in zip(left, sizes, strict=True)]
        order = interleaved(sequences, rng)
        if not order:
            continue
        tokens, sequences = [tokens[i] for i in order], [sequences[i] for i in order]
        model.engine.run(Batch(tokens, sequences=sequences, want_logits=True))
        for sequence, row in zip(sequences, model.engine.logits(), strict=True):
            got[sequence].append(row)
    for rows, text_want in zip(got, expected, strict=True):
        assert relative_l2(np.stack(rows), text_want) <= SAME


def test_only_wanted_rows_come_back(model, want):
    wanted = np.zeros(len(PROMPT), dtype=bool)
    wanted[[0, 31, 32, 149]] = True
    model.engine.run(Batch(PROMPT, want_logits=wanted))
    assert relative_l2(model.engine.logits(), want[wanted]) <= SAME


# ---- tree masks -------------------------------------------------------------------------------------------


def tree_mask(parents: list[int]) -> np.ndarray:
    """uint64 [n, ceil(n / 64)]: every token sees itself and its ancestors; parent -1: what came before."""
    mask = np.zeros((len(parents), -(-len(parents) // 64)), dtype=np.uint64)
    for row, parent in enumerate(parents):
        mask[row, row // 64] |= np.uint64(1) << np.uint64(row % 64)
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


@pytest.mark.parametrize("before", [0, 20, 32, 50])
@pytest.mark.parametrize("n", [1, 3, 12, 70])
def test_a_chain_is_the_causal_run(n, before, model, want):
    if before:
        run_chunks(model, PROMPT[:before], before)
    tokens = PROMPT[before : before + n]
    chain = tree_mask(list(range(-1, n - 1)))
    model.engine.run(Batch(tokens, want_logits=True, tree_mask=chain))
    assert relative_l2(model.engine.logits(), want[before : before + n]) <= SAME


@pytest.mark.parametrize("before", [3, 31, 64])
def test_siblings_are_separate_sequences(before, path):
    """Two branches of three tokens after a common token, in one step; the rows of the branches mingle."""
    prefix, (a, b) = PROMPT[: before + 1], (PROMPT[100:103], PROMPT[110:113])
    tokens = [prefix[-1], a[0], b[0], b[1], a[1], a[2], b[2]]
    parents = [-1, 0, 0, 2, 1, 4, 3]
    depths = [0, 1, 1, 2, 2, 3, 3]
    with Model.load(path, threads=2, ffn="exact") as model:
        branch_a = model.logits(prefix + a)
        branch_b = model.logits(prefix + b)
        model.engine.kv_truncate(0, 0)
        run_chunks(model, prefix[:-1], before)
        positions = [before + depth for depth in depths]
        batch = Batch(tokens, positions=positions, want_logits=True, tree_mask=tree_mask(parents))
        model.engine.run(batch)
        got = model.engine.logits()
        assert relative_l2(got[[0, 1, 4, 5]], branch_a[before:]) <= SAME
        assert relative_l2(got[[0, 2, 3, 6]], branch_b[before:]) <= SAME
        # the first branch of a tree can be kept: here the common token and a[0]
        model.engine.kv_truncate(0, before + 2)
        assert relative_l2(run_chunks(model, a[1:], 2), branch_a[before + 2 :]) <= SAME


# ---- the KV cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 100])
def test_copies_go_their_own_ways(n, model, want):
    """After a copy both write in turn, so that a page which both still hold would mix them up."""
    other = OTHERS[0][:8]
    other_want = model.logits(PROMPT[:n] + other)[n:]
    model.engine.kv_truncate(0, n)
    model.engine.kv_copy(0, 2)
    assert model.engine.kv_length(2) == n
    first = run_chunks(model, other[:4], 4, sequence=2)
    second = run_chunks(model, PROMPT[n : n + 4], 4)
    third = run_chunks(model, other[4:], 4, sequence=2)
    fourth = run_chunks(model, PROMPT[n + 4 : n + 8], 4)
    assert relative_l2(np.concatenate([first, third]), other_want) <= SAME
    assert relative_l2(np.concatenate([second, fourth]), want[n : n + 8]) <= SAME


def test_a_copy_outlives_its_source(model, want):
    run_chunks(model, PROMPT[:70], 70)
    model.engine.kv_copy(0, 1)
    model.engine.kv_truncate(0, 0)
    run_chunks(model, OTHERS[2], 66)  # takes the freed pages, if they were freed wrongly
    assert relative_l2(run_chunks(model, PROMPT[70:80], 10, sequence=1), want[70:80]) <= SAME


@pytest.mark.parametrize("n", [1, 31, 32, 33, 80])
def test_truncation_forgets(n, model, want):
    run_chunks(model, PROMPT[:90], 90)
    model.engine.kv_truncate(0, n)
    assert model.engine.kv_length() == n
    run_chunks(model, OTHERS[0][:8], 8)
    model.engine.kv_truncate(0, n)
    assert relative_l2(run_chunks(model, PROMPT[n : n + 9], 9), want[n : n + 9]) <= SAME


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("n", [0, 1, 32, 77])
def test_saved_sequences_give_the_same_bits(n, kv_type, path):
    with Model.load(path, kv_type=kv_type, sequences=2) as model:
        if n:
            run_chunks(model, PROMPT[:n], n)
        saved = model.engine.kv_save(0)
        expected = bits(run_chunks(model, PROMPT[n : n + 4], 1))
        run_chunks(model, OTHERS[1], 7, sequence=1)
        model.engine.kv_load(1, saved)
        assert bits(run_chunks(model, PROMPT[n : n + 4], 1, sequence=1)) == expected
    with Model.load(path, kv_type=kv_type) as fresh:
        fresh.engine.kv_load(0, saved)
        assert fresh.engine.kv_length() == n
        assert bits(run_chunks(fresh, PROMPT[n : n + 4], 1)) == expected


def test_saved_sequences_of_another_kind_are_refused(path):
    with Model.load(path, kv_type="f16") as half, Model.load(path, kv_type="f32") as whole:
        run_chunks(half, PROMPT[:9], 9)
        with pytest.raises(PiError, match="KV type"):
            whole.engine.kv_load(0, half.engine.kv_save(0))
        with pytest.raises(PiError, match="length"):
            half.engine.kv_load(0, half.engine.kv_save(0)[:-1])


def test_the_context_limit_is_an_error_that_changes_nothing(path, want):
    with Model.load(path, context=100, sequences=2) as model:
        run_chunks(model, PROMPT[:98], 98)
        with pytest.raises(PiError, match="context of 100"):
            run_chunks(model, PROMPT[98:101], 3)
        assert model.engine.kv_length() == 98
        assert relative_l2(run_chunks(model, PROMPT[98:100], 2), want[98:100]) <= SAME
        with pytest.raises(PiError, match="context of 100"):
            model.logits(PROMPT[:101])


def test_generation_ends_at_the_context_limit(path):
    with Model.load(path, context=20) as model:
        generation = model.generate(PROMPT[:15], ignore_eos=True)
        # the token after the last one that fits is still known
        assert len(list(generation)) == 20 - 15 + 1
        assert generation.finish_reason == "context"


def test_positions_must_follow_their_sequence(model):
    with pytest.raises(UsageError, match="position"):
        model.engine.run(Batch(PROMPT[:3], positions=[0, 1, 3]))
    with pytest.raises(UsageError, match="position"):
        model.engine.run(Batch(PROMPT[:2], positions=[1, 2]))


# ---- generation -------------------------------------------------------------------------------------------


def test_greedy_is_argmax(path, want):
    with Model.load(path, threads=2) as model:
        generation = model.generate(PROMPT[:40], n_predict=30, sampling=GREEDY, ignore_eos=True)
        drawn = list(generation)
        text = PROMPT[:40] + [token.id for token in drawn]
        logits = decode(model, text)[39:-1]
    assert [token.id for token in drawn] == logits.argmax(axis=-1).tolist()
    peak = logits.max(axis=-1).astype(np.float64)
    total = np.log(np.exp(logits - peak[:, None]).sum(axis=-1))
    np.testing.assert_allclose([token.logprob for token in drawn], -total, atol=1e-5)


def test_reused_cache_gives_the_same_text(path):
    def text(model: Model, prompt: list[int], reuse: bool) -> list[int]:
        settings = {"n_predict": 12, "sampling": GREEDY, "ignore_eos": True}
        return [t.id for t in model.generate(prompt, reuse_cache=reuse, **settings)]

    with Model.load(path) as model:
        alone = [text(model, PROMPT[:n], reuse=False) for n in (20, 33, 25)]
        chained = [text(model, PROMPT[:n], reuse=True) for n in (20, 33, 25)]
    assert chained == alone
