"""pi-bench synth: what the engine counts in its models is what was asked for (about 10 s)."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest

from parity.closeness import log_softmax
from parity.llama_cpp_process import run_llama_cpp
from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime.bench import main
from powerinfer_toolkit.runtime.engine import Batch, FfnRule
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.sampling import Sampling
from powerinfer_toolkit.runtime.synth.command import LOCALITIES, OUTTYPES
from powerinfer_toolkit.runtime.synth.firing import Locality, firing
from powerinfer_toolkit.runtime.synth.shapes import NOT_YET, SHAPES
from powerinfer_toolkit.runtime.synth.write import SynthSettings, write_synth
from powerinfer_toolkit.statistics import coverage_curves
from refusals import assert_refused, run_command

N_TOKENS = 960  # of which 959 are counted
N_LAYERS = 2


@pytest.fixture(scope="module")
def synth(tmp_path_factory):
    """synth(outtype, settings...) -> path of a model of the tiny shape, made once."""
    made = {}

    def write(outtype: str = "f16", **settings):
        key = (outtype, *sorted(settings.items()))
        if key not in made:
            path = tmp_path_factory.mktemp("synth") / "model.gguf"
            kind = TensorType[outtype.upper()]
            settings = {"n_layers": N_LAYERS, **settings}
            size = write_synth(SynthSettings("tiny", path, kind, **settings))
            assert path.stat().st_size == size
            made[key] = path
        return made[key]

    return write


def fired(path, rule: FfnRule = FfnRule.EXACT, n_tokens: int = N_TOKENS):
    """What fires at positions 1 to n_tokens - 1 of random tokens, and the share of gates computed."""
    tokens = np.random.default_rng(0).integers(3, SHAPES["tiny"].n_vocab, n_tokens)
    with Model.load(path, threads=1, context=n_tokens, batch=n_tokens, ffn="predicted") as model:
        model.engine.record_fired(True)
        model.engine.run(Batch(tokens, ffn_rules=rule))
        return model.engine.fired()[1:], model.stats().guessed_share


@pytest.mark.parametrize("locality", LOCALITIES)
def test_rates_follow_the_curve(synth, locality):
    counts = fired(synth(locality=Locality(locality)))[0].mean(axis=0)
    wanted = firing(counts.shape[1], Locality(locality), 0.9)
    # Of 959 tokens and 2,048 neurons the mean varies by a per cent (a token moves all neurons alike), the share of
    # the hottest ones by less.
    np.testing.assert_allclose(counts.mean(axis=1), 0.1, rtol=0.03)
    np.testing.assert_allclose(
        np.cumsum(counts, axis=1)[:, ::64] / counts.sum(axis=1, keepdims=True),
        np.tile(np.cumsum(wanted.rates)[::64] / wanted.rates.sum(), (N_LAYERS, 1)),
        atol=0.01,
    )
    assert np.corrcoef(counts[0], wanted.rates)[0, 1] > 0.99


def test_predictors_find_what_fires(synth):
    truth, _ = fired(synth())
    found, guessed = fired(synth(), FfnRule.PREDICT)
    assert (truth & found).sum() / truth.sum() >= 0.98
    # position 0 is exact
    assert (guessed * N_TOKENS - 1) / (N_TOKENS - 1) == pytest.approx(0.125, rel=0.04)


@pytest.mark.parametrize("outtype", [t for t in OUTTYPES if t != "f16"])
def test_every_type_keeps_rates_and_recall(synth, outtype):
    truth, _ = fired(synth(outtype), n_tokens=256)
    found, guessed = fired(synth(outtype), FfnRule.PREDICT, n_tokens=256)
    # The rounding of a gate's constants moves rates of 3-bit types by some per cent, of others by less than the
    # choice of 255 tokens does (4%).
    assert truth.mean() == pytest.approx(0.1, rel=0.08)
    assert (truth & found).sum() / truth.sum() >= 0.98
    assert guessed == pytest.approx(0.125, rel=0.1)


@pytest.mark.parametrize("zeros", [0.5, 0.98])
def test_other_shares_of_zeros(synth, zeros):
    assert fired(synth(zeros=zeros))[0].mean() == pytest.approx(1 - zeros, rel=0.05)


def test_tokens_of_a_greedy_text_differ(synth):
    with Model.load(synth(), context=64) as model:
        greedy = model.generate(
            [5], n_predict=40, ignore_eos=True, sampling=Sampling(temperature=0)
        )
        ids = [token.id for token in greedy]
    assert len(set(ids)) == 40


def test_same_settings_same_bytes(synth, tmp_path):
    again = tmp_path / "again.gguf"
    write_synth(SynthSettings("tiny", again, TensorType.Q4_0, n_layers=N_LAYERS))
    assert again.read_bytes() == synth("q4_0").read_bytes()


def test_the_twin_is_a_plain_dense_file_with_the_same_weights(synth):
    sparse, twin = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        for path in (synth("q4_0"), synth("q4_0", dense_twin=True))
    )
    shared = sparse.keys() & twin.keys()
    assert {name.split(".")[2] for name in twin.keys() - shared} == {"ffn_down"}
    assert {name.split(".")[2] for name in sparse.keys() - shared} == {"ffn_down_t", "fc1", "fc2"}
    for name in shared - {f"blk.{layer}.attn_output.weight" for layer in range(N_LAYERS)}:
        np.testing.assert_array_equal(sparse[name].data, twin[name].data)
    with Model.load(synth("q4_0", dense_twin=True), context=32) as model:
        assert np.isfinite(model.logits([1, 300, 17])).all()
        assert model.plan.ffn_mode.name == "DENSE"


def test_the_file_says_that_it_is_synthetic(synth):
    fields = gguf.GGUFReader(synth("q4_0")).fields
    assert fields["powerinfer.synthetic"].contents() == "tiny"
    assert fields["general.name"].contents() == "synthetic-tiny-2-layers"
    assert '"zeros": 0.9' in fields["powerinfer.manifest"].contents()
    curve = np.array(fields["powerinfer.statistics.coverage"].contents()).reshape(N_LAYERS, 129)
    assert curve[0, 33] == pytest.approx(0.67, abs=0.01)  # of the hottest 26%
    assert fields["powerinfer.predictor.density"].contents() == pytest.approx(0.125, rel=0.01)


def test_its_tokenizer_gives_back_a_text(synth):
    with Model.load(synth(), context=32) as model:
        text = "A cat, e\u0301t\u00e9."
        assert model.tokenizer.decode(model.tokenizer.encode(text)[1:]) == text


@pytest.mark.parametrize(
    ("shares", "carried"), [((0.06, 0.26, 0.75), (0.32, 0.67, 0.96)), ((0.26,), (0.80,))]
)
def test_curves_are_the_published_ones(shares, carried):
    locality = Locality.SMOLLM2 if len(shares) == 3 else Locality.POWERINFER
    curve = coverage_curves(firing(11008, locality, 0.9).rates[None])[0]
    np.testing.assert_allclose(
        np.interp(shares, np.linspace(0, 1, 129), curve), carried, atol=0.005
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_shapes_have_whole_blocks_and_predictors_of_8_per_cent(shape):
    assert shape.n_ff % 256 == 0
    assert shape.n_embd % (32 if shape.name == "135m" else 256) == 0
    parameters = shape.predictor_rank * (shape.n_embd + shape.n_ff)
    assert parameters / (3 * shape.n_embd * shape.n_ff) == pytest.approx(0.08, rel=0.05)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["9b"], "unknown shape '9b'"),
        *(([name], f"shape {name} needs") for name in NOT_YET),
        (["135m", "--outtype", "q4_k"], "rows of 576 elements are no whole blocks of Q4_K"),
        (["tiny", "--zeros", 1], "share of zeros of 1.0"),
        (["tiny", "--zeros", "nan"], "share of zeros of nan"),
        (["tiny", "--layers", 0], "0 layers"),
        (["tiny", "--outtype", "q9"], "invalid choice"),
    ],
)
def test_refusals(flags, says, tmp_path, capsys):
    shape, *rest = flags
    said = run_command(main, capsys, "synth", shape, tmp_path / "x.gguf", *rest)
    assert_refused(said, 2, says)
    assert not list(tmp_path.iterdir())


def test_an_existing_file_stays(tmp_path, capsys):
    path = tmp_path / "x.gguf"
    path.write_text("mine")
    assert_refused(run_command(main, capsys, "synth", "tiny", path), 1, "exists already")
    assert path.read_text() == "mine"
    said = run_command(main, capsys, "synth", "tiny", path, "--layers", 1, "--force")
    assert (said.code, said.out) == (0, "")
    assert "synthetic" in said.err


def test_llama_cpp_runs_the_twin(tmp_path):
    """Its log-probabilities equal ours: F32 weights, F32 caches and activations."""
    pytest.importorskip("xllamacpp")
    path = tmp_path / "twin.gguf"
    settings = SynthSettings("tiny", path, TensorType.F32, n_layers=N_LAYERS, dense_twin=True)
    write_synth(settings)
    prompts = np.random.default_rng(4).integers(300, 1024, (4, 12)).tolist()
    done = run_llama_cpp(path, prompts)
    assert done.returncode == 0, done.stderr
    with Model.load(path, context=32, activation_type="f32") as model:
        for prompt, answer in zip(prompts, json.loads(done.stdout), strict=True):
            want = log_softmax(model.logits(prompt)[-1].astype(np.float64))
            # float32 sums of 512 terms: eps x sqrt(n) x matrices in a row x |logit|, 6e-8 x 23 x 15 x 10
            np.testing.assert_allclose(answer, want, atol=3e-4)
