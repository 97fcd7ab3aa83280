"""pi-run --record-activations: any chunking gives the sums of whole sequences; files, orders, refusals (about 4 s)."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from parity.synthetic import Shape, random_weights, write_gguf
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.cli import main
from powerinfer_toolkit.runtime.record import ActivationRecorder, save_recorded
from powerinfer_toolkit.statistics import ActivationStatistics, Tally, layer_sums

BOS = 1
N_LAYERS, N_FF = 2, 3


def whole_tally(sequences):
    """The tally of sequences [(tokens, fired [n, layers, n_ff])] that begin at position 0."""
    tally = Tally.zeros(N_LAYERS, N_FF)
    for tokens, fired in sequences:
        counted = (tokens != BOS)[None, 1:]
        for layer in range(N_LAYERS):
            tally.add_layer(layer, layer_sums(fired[None, 1:, layer], counted))
        tally.add_tokens(counted)
    return tally


@given(st.data())
def test_chunks_give_the_sums_of_whole_sequences(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 100)))
    recorder, sequences = ActivationRecorder(N_LAYERS, N_FF, BOS), []
    for length in data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=3)):
        tokens = np.where(rng.random(length) < 0.02, BOS, 9)
        fired = rng.random((length, N_LAYERS, N_FF)) < 0.4
        sequences.append((tokens, fired))
        begin = 0
        while begin < length:
            end = min(length, begin + data.draw(st.integers(1, 90)))
            recorder.observe(begin, tokens[begin:end].tolist(), fired[begin:end])
            begin = end
    for name, array in whole_tally(sequences).arrays().items():
        np.testing.assert_array_equal(recorder.tally().arrays()[name], array, err_msg=name)


def test_a_kept_beginning_is_not_counted_again():
    """A chat that keeps 10 positions and goes on from there: no pair and no window crosses the jump."""
    fired = np.ones((20, N_LAYERS, N_FF), bool)
    recorder = ActivationRecorder(N_LAYERS, N_FF, None)
    recorder.observe(0, [5] * 20, fired)
    recorder.observe(10, [5] * 4, fired[:4])
    tally = recorder.tally()
    assert tally.tokens.tolist() == [19 + 4]
    assert tally.both.tolist() == [N_FF * (18 + 3)] * N_LAYERS
    # positions 1..19 hold 9 windows of 2; 10..13 hold (11, 12)
    assert tally.windows[0] == 9 + 1


def run(*arguments):
    return main([str(argument) for argument in arguments])


def prompt_tokens(n):
    return np.random.default_rng(0).integers(3, 293, n).tolist()


@pytest.fixture
def relu_gguf(synthetic_gguf):
    return synthetic_gguf("relu")


def record(path, tokens, **options):
    """The tally and the engine's own counters of one scored text."""
    with Model.load(path, **options) as model:
        recorder = model.record_activations()
        model.score(tokens)
        return recorder.tally(), model.stats()


class NoTokenizer:
    """Synthetic files have none."""

    bos_id, adds_bos = None, False


@pytest.fixture(autouse=True)
def no_tokenizer(monkeypatch, request):
    if "relu_gguf" in request.fixturenames:
        monkeypatch.setattr(Model, "tokenizer", NoTokenizer())


def test_counts_agree_with_the_engines_counters(relu_gguf):
    tokens = prompt_tokens(80)
    first, stats = record(relu_gguf, tokens, batch=1)
    sink, sink_stats = record(relu_gguf, tokens[:1] + tokens[:1], batch=1)
    # the counters include position 0, which is the same as that of a text of its first token alone
    at_sink = sink_stats.neurons_active - int(sink.counts.sum())
    assert int(first.counts.sum()) == stats.neurons_active - at_sink
    assert first.tokens.tolist() == [79]


def test_large_steps_count_what_single_tokens_count(relu_gguf):
    """Rounding differs between the kernels by 1e-6: of 25,000 activations at most a few lie that near to 0."""
    tokens = prompt_tokens(80)
    single, _ = record(relu_gguf, tokens, batch=1)
    large, _ = record(relu_gguf, tokens, batch=64)
    dense, _ = record(relu_gguf, tokens, batch=64, ffn="dense")
    for other in (large, dense):
        assert np.abs(single.counts - other.counts).sum() <= 3
        np.testing.assert_array_equal(single.windows, other.windows)


def test_predicted_mode_is_refused(synthetic_gguf):
    with (
        Model.load(synthetic_gguf("predictors"), ffn="predicted") as model,
        pytest.raises(UsageError, match="predicted mode drops some"),
    ):
        model.record_activations()


def test_silu_is_refused(synthetic_gguf):
    with (
        Model.load(synthetic_gguf("dense")) as model,
        pytest.raises(UsageError, match="needs a ReLU model"),
    ):
        model.record_activations()


def hot_first_file(folder):
    shape = Shape(n_layers=2)
    keys = {Key.ACTIVATION: "relu", Key.NEURON_ORDER: "hot_first", Key.STATISTICS_SHA256: "cafe"}
    return write_gguf(folder / "hot.gguf", shape, random_weights(shape, seed=0), keys=keys), shape


def recorded(path, out):
    with Model.load(path) as model:
        recorder = model.record_activations()
        model.score(prompt_tokens(40))
        save_recorded(recorder, model, out)
        return recorder.tally(), ActivationStatistics.load(out)


def test_the_sidecar_gives_the_original_order(tmp_path, monkeypatch):
    monkeypatch.setattr(Model, "tokenizer", NoTokenizer())
    path, shape = hot_first_file(tmp_path)
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(shape.n_ff) for _ in range(2)]).astype(np.int32)
    sidecar = tmp_path / "hot.activations.safetensors"
    save_file({"permutation": order}, sidecar, {"sha256": "cafe"})
    in_file_order, statistics = recorded(path, tmp_path / "out.safetensors")
    assert not statistics.in_file_order
    for layer in range(2):
        for place in range(shape.n_ff):
            assert (
                statistics.tally.counts[layer, order[layer, place]]
                == in_file_order.counts[layer, place]
            )


@pytest.mark.parametrize("sidecar_of", [None, "beef"])
def test_without_its_sidecar_a_file_is_recorded_in_its_own_order(
    tmp_path, monkeypatch, capsys, sidecar_of
):
    monkeypatch.setattr(Model, "tokenizer", NoTokenizer())
    path, shape = hot_first_file(tmp_path)
    if sidecar_of:
        order = np.zeros((2, shape.n_ff), np.int32)
        sidecar = tmp_path / "hot.activations.safetensors"
        save_file({"permutation": order}, sidecar, {"sha256": sidecar_of})
    in_file_order, statistics = recorded(path, tmp_path / "out.safetensors")
    assert statistics.in_file_order
    np.testing.assert_array_equal(statistics.tally.counts, in_file_order.counts)
    assert "numbered as in the file" in capsys.readouterr().err


def test_recordings_add_up_and_models_do_not_mix(relu_gguf, tmp_path):
    out = tmp_path / "out.safetensors"
    recorded(relu_gguf, out)
    once, twice = recorded(relu_gguf, out)
    np.testing.assert_array_equal(twice.tally.counts, 2 * once.counts)
    manifest = json.loads(twice.manifest.to_json())
    assert manifest["settings"]["recorded_by"] == "pi-run"
    shutil.copy(out, tmp_path / "held.safetensors")
    other = Shape(n_layers=1)
    keys = {Key.ACTIVATION: "relu"}
    path = write_gguf(tmp_path / "o.gguf", other, random_weights(other, seed=1), keys=keys)
    with pytest.raises(PiError, match="statistics of another model"):
        recorded(path, out)
    assert out.read_bytes() == (tmp_path / "held.safetensors").read_bytes()


def test_nothing_runs_for_a_file_that_could_not_be_written(relu_gguf, tmp_path, capsys):
    out = tmp_path / "missing" / "out.safetensors"
    code = run("-m", relu_gguf, "-p", "x", "--record-activations", out)
    assert code == 1
    assert "missing is not a directory" in capsys.readouterr().err
