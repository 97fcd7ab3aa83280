"""The Python API: what it refuses, and that its paths through the engine agree with each other."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace

import numpy as np
import pytest

from parity.closeness import log_softmax
from parity.reference import Reference
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.runtime import Model, native_lib
from powerinfer_toolkit.runtime.engine import Batch, Engine
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.machine import probe
from powerinfer_toolkit.runtime.plan.planner import PlanOptions, memory_need, plan_cpu
from powerinfer_toolkit.runtime.sampling import Sampling

GREEDY = Sampling(temperature=0)
# Float32 files and activations: other batch shapes only reorder float32 sums of at most a few hundred
# terms, eps x sqrt(n) x depth of logits near 1.
REORDERED = 2e-5


@pytest.fixture(scope="module")
def model(synthetic_gguf):
    with Model.load(synthetic_gguf("dense"), threads=2, batch=32, sequences=3) as loaded:
        yield loaded


def tokens_of(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 293, n)


def test_logits_are_the_references(model, synthetic_gguf):
    tokens = tokens_of(70)
    want = Reference.load(synthetic_gguf("dense")).logits(tokens.tolist())
    got = model.logits(tokens)
    assert (got.dtype, got.shape) == (np.float32, (70, 293))
    np.testing.assert_allclose(got, want, atol=REORDERED)


def test_score_is_the_log_softmax_of_the_logits(model):
    tokens = tokens_of(70)
    want = log_softmax(model.logits(tokens))[np.arange(69), tokens[1:]]
    got = model.score(tokens)
    assert (got.dtype, got.shape) == (np.float32, (69,))
    np.testing.assert_allclose(got, want, atol=REORDERED)
    assert model.score(tokens[:1]).shape == (0,)


def test_calls_start_from_an_empty_sequence(model):
    first = model.logits(tokens_of(40))
    model.logits(tokens_of(9, seed=1))
    assert model.logits(tokens_of(40)).tobytes() == first.tobytes()


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([], "empty"),
        ([-1], "-1 is not in"),
        ([293], "293 is not in"),
        ([2**40], "is not in"),
        ([1.5], "integers"),
        (["a"], "integers"),
        ([[1, 2]], "shape"),
        (5, "shape"),
    ],
)
def test_refused_tokens(model, tokens, says):
    for call in (model.logits, model.score, model.generate):
        with pytest.raises(UsageError, match=says):
            call(tokens)


def test_the_context_limit_is_named(model):
    with pytest.raises(PiError, match="513 tokens does not fit the context of 512"):
        model.logits(tokens_of(513))
    assert model.logits(tokens_of(512)).shape[0] == 512


def test_use_after_close(synthetic_gguf):
    model = Model.load(synthetic_gguf("dense"))
    config = model.config
    model.close()
    model.close()
    assert config.n_vocab == model.config.n_vocab
    for use in (lambda: model.logits([1]), lambda: model.metadata("a"), model.stats):
        with pytest.raises(PiError, match="closed"):
            use()


def test_a_forgotten_model_is_freed(synthetic_gguf):
    handles = []
    for _ in range(3):
        model = Model.load(synthetic_gguf("dense"))
        next(model.generate([5], sampling=GREEDY))
        handles.append(model.engine)
        del model
    gc.collect()
    assert all(engine._pointer is None for engine in handles)


def test_files_that_are_no_models(tmp_path):
    with pytest.raises(PiError, match="no\\.gguf"):
        Model.load(tmp_path / "no.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(PiError):
        Model.load(tmp_path / "text.gguf")
    with pytest.raises(PiError):
        Model.load(tmp_path)


def test_metadata(model):
    assert model.metadata("llama.block_count") == 2
    assert model.metadata("general.architecture") == "llama"
    assert model.metadata("llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-5)
    assert model.metadata("tokenizer.ggml.tokens")[:3] == ["<unk>", "<s>", "</s>"]
    assert model.metadata("no.such.key") is None


def test_the_plan_foresees_the_memory(model):
    model.logits(tokens_of(64))
    need, stats = memory_need(model.config, model.plan), model.stats()
    assert stats.kv_bytes == need.kv_bytes
    logits_bytes = 4 * model.plan.max_batch_tokens * model.config.n_vocab
    assert 0 < stats.scratch_bytes + logits_bytes <= need.scratch_bytes


# ---- generation


def greedy(model: Model, prompt: list[int], n: int) -> list[int]:
    """Tokens by the argmax of logits that are computed anew for every one."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_generation_is_the_argmax(model):
    prompt = tokens_of(40).tolist()
    want = greedy(model, prompt, 12)
    generation = model.generate(prompt, n_predict=12, sampling=GREEDY, ignore_eos=True)
    tokens = list(generation)
    assert [token.id for token in tokens] == want == generation.token_ids
    assert generation.finish_reason == "length"
    logprobs = log_softmax(model.logits(prompt + want))[len(prompt) - 1 : -1]
    want_logprobs = logprobs[np.arange(12), want]
    np.testing.assert_allclose([t.logprob for t in tokens], want_logprobs, atol=REORDERED)


def test_a_seed_decides_the_text(model):
    def draw(seed: int | None) -> list[int]:
        generation = model.generate([5, 6], n_predict=20, sampling=Sampling(seed=seed))
        assert seed in (None, generation.seed)
        return [token.id for token in generation]

    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    assert draw(None) != draw(None)


def test_generation_ends_where_the_context_does(synthetic_gguf):
    with Model.load(synthetic_gguf("dense"), context=40) as model:
        generation = model.generate(tokens_of(30), sampling=GREEDY, ignore_eos=True)
        # the last of the 40 tokens of the context still has a successor
        assert len(list(generation)) == 11
        assert generation.finish_reason == "context"
        with pytest.raises(PiError, match="41 tokens does not fit the context of 40"):
            model.generate(tokens_of(41))


def test_zero_tokens_compute_nothing(model):
    model.engine.reset_stats()
    generation = model.generate([5], n_predict=0)
    assert list(generation) == []
    assert generation.finish_reason == "length"
    assert model.stats().n_tokens == 0


def test_end_of_generation(model, monkeypatch):
    free = model.generate([9], n_predict=10, sampling=GREEDY, ignore_eos=True)
    ids = [token.id for token in free]
    last = ids[4]
    monkeypatch.setattr(model.tokenizer, "eog_ids", frozenset([last]))
    generation = model.generate([9], n_predict=10, sampling=GREEDY)
    assert [token.id for token in generation] == ids[: ids.index(last)]
    assert generation.finish_reason == "stop"
    assert list(generation) == []


def full_text(model: Model, **options: object) -> tuple[str, str]:
    generation = model.generate([9], n_predict=30, sampling=GREEDY, ignore_eos=True, **options)
    text = "".join(token.text for token in generation)
    return text + generation.remainder, generation.finish_reason


def test_stop_texts_end_the_output_and_are_not_in_it(model):
    text, _ = full_text(model)
    for stop in (text[5:6], text[3:9], text[:2]):
        assert full_text(model, stop=[stop]) == (text[: text.index(stop)], "stop")


def test_a_stop_text_that_only_begins_is_output(model):
    text, _ = full_text(model)
    assert full_text(model, stop=[text[-3:] + "\0"]) == (text, "length")
    assert full_text(model, stop=["", text[4] + "\0"]) == (text, "length")


def test_reused_cache_gives_the_same_text(model):
    prompt = tokens_of(50).tolist()
    first = [t.id for t in model.generate(prompt, n_predict=5, sampling=GREEDY, ignore_eos=True)]
    longer = prompt + first + tokens_of(20, seed=3).tolist()
    alone = model.generate(longer, n_predict=8, sampling=GREEDY, ignore_eos=True)
    want = [token.id for token in alone]
    for token in model.generate(prompt, n_predict=5, sampling=GREEDY, ignore_eos=True):
        assert token.id in first
    model.engine.reset_stats()
    again = model.generate(longer, n_predict=1, sampling=GREEDY, reuse_cache=True, ignore_eos=True)
    assert [token.id for token in again] == want[:1]
    # what was fed before: the prompt and four of its five tokens
    assert model.stats().n_tokens == len(longer) - len(prompt) - 4


def test_a_new_text_takes_the_sequence(model):
    old = model.generate([5], sampling=GREEDY, ignore_eos=True)
    next(old)
    model.logits([7])
    with pytest.raises(PiError, match="another call"):
        next(old)


# ---- steps with several sequences


def test_interleaved_sequences_equal_single_ones(model):
    engine = model.engine
    lengths = (20, 7, 13)
    texts = [tokens_of(n, seed=n) for n in lengths]
    alone = [model.logits(text) for text in texts]
    for sequence in range(3):
        engine.kv_truncate(sequence, 0)
    order = np.random.default_rng(1).permutation(np.repeat(np.arange(3), lengths))
    fed = [0, 0, 0]
    tokens = np.empty(40, dtype=np.int32)
    for i, sequence in enumerate(order):
        tokens[i] = texts[sequence][fed[sequence]]
        fed[sequence] += 1
    rows = []
    for begin in range(0, 40, 16):
        part = slice(begin, begin + 16)
        engine.run(Batch(tokens[part], sequences=order[part], want_logits=True))
        rows.append(engine.logits())
    together = np.concatenate(rows)
    for sequence in range(3):
        np.testing.assert_allclose(together[order == sequence], alone[sequence], atol=REORDERED)
        assert engine.kv_length(sequence) == lengths[sequence]


def test_copied_sequences_go_separate_ways(model):
    engine = model.engine
    prompt = tokens_of(32)
    model.logits(prompt)
    engine.kv_copy(0, 1)
    saved = engine.kv_save(0)
    engine.run(Batch([11, 12], want_logits=[False, True]))
    first = engine.logits()
    engine.run(Batch([21, 22], sequences=1, want_logits=[False, True]))
    second = engine.logits()
    np.testing.assert_allclose(first[0], model.logits([*prompt, 11, 12])[-1], atol=REORDERED)
    np.testing.assert_allclose(second[0], model.logits([*prompt, 21, 22])[-1], atol=REORDERED)
    engine.kv_load(2, saved)
    assert engine.kv_length(2) == 32
    engine.run(Batch([11, 12], sequences=2, want_logits=[False, True]))
    assert engine.logits().tobytes() == first.tobytes()
    engine.kv_truncate(2, 32)
    engine.run(Batch([21, 22], sequences=2, want_logits=[False, True]))
    np.testing.assert_allclose(engine.logits(), second, atol=REORDERED)


def test_wanted_rows_and_targets(model):
    tokens = tokens_of(20)
    want = model.logits(tokens)
    model.forget()
    wanted = np.arange(20) % 9 != 1  # more than 16, so that the head takes the same kernel
    targets = np.where(np.arange(20) % 4 == 0, 17, -1)
    model.engine.run(Batch(tokens, want_logits=wanted, targets=targets))
    assert model.engine.logits().tobytes() == want[wanted].tobytes()
    logprobs = model.engine.logprobs()
    assert np.isnan(logprobs[targets == -1]).all()
    np.testing.assert_allclose(
        logprobs[targets == 17], log_softmax(want)[targets == 17, 17], atol=REORDERED
    )


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (Batch([]), "at least one token"),
        (Batch([1] * 33), "33"),
        (Batch([1, 2], sequences=3), "sequences: 3 is not in"),
        (Batch([1, 2], sequences=[0]), "shape"),
        (Batch([1, 2], positions=[0, 5]), "position 5"),
        (Batch([1], targets=[293]), "targets: 293"),
        (Batch([1], ffn_rules=7), "rule 7"),
        (Batch([1], tree_mask=[1]), "tree_mask"),
        (Batch([], embeddings=[[1.0]]), "embeddings are"),
    ],
)
def test_refused_batches(model, batch, says):
    model.forget()
    with pytest.raises(UsageError, match=says):
        model.engine.run(batch)
    assert model.engine.kv_length() == 0
    assert model.logits([1]).shape == (1, 293)


def test_two_steps_at_once_are_refused(model):
    model.forget()
    hold = threading.Event()
    callback = native_lib.AbortFn(lambda _user: 0 if hold.wait(60) else 1)
    library = native_lib.load()
    library.pi_engine_set_abort(model.engine.handle, callback, None)
    try:
        ticket = model.engine.submit(Batch([1, 2]))
        batch = Batch([1], positions=[2])
        for use in (
            lambda: model.engine.submit(batch),
            lambda: model.engine.run(batch),  # does not end the other's step
            model.engine.kv_length,
            model.stats,
        ):
            with pytest.raises(PiError, match="still running"):
                use()
        hold.set()
        model.engine.wait(ticket)
    finally:
        hold.set()
        library.pi_engine_set_abort(model.engine.handle, native_lib.AbortFn(), None)
    assert model.engine.kv_length() == 2


def test_a_load_that_does_not_fit_loses_nothing(synthetic_gguf):
    """Three pages for two sequences of up to two: the second cannot take a copy of a full first."""
    file = ModelFile(synthetic_gguf())
    plan = plan_cpu(file.shape, PlanOptions(threads=1, context=64, sequences=2), probe())
    with file, Engine(file, replace(plan, n_kv_pages=3)) as engine:
        engine.run(Batch(tokens=[1] * 64, sequences=0))
        engine.run(Batch(tokens=[2] * 20, sequences=1))
        with pytest.raises(PiError, match="KV cache is full"):
            engine.kv_load(1, engine.kv_save(0))
        assert engine.kv_length(1) == 20
        engine.kv_truncate(0, 32)
        engine.kv_load(1, engine.kv_save(0))
        assert engine.kv_length(1) == 32
