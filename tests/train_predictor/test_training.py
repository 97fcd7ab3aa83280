"""Whole trainings of seconds: what is reported, resumed, refused, and better than singular vectors (about 25 s)."""

import json

import numpy as np
import pytest
import torch
import transformers
import yaml

from parity.sparse_checkpoint import text_of
from powerinfer_toolkit.artifact import Manifest, Origin
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.statistics import ActivationStatistics
from powerinfer_toolkit.train_predictor import groups, train
from powerinfer_toolkit.train_predictor.cli import main
from powerinfer_toolkit.train_predictor.masking import SINK_POSITIONS
from powerinfer_toolkit.train_predictor.texts import read_texts
from powerinfer_toolkit.training.blocks import TokenStore, text_encoder


def read(folder, name):
    return json.loads((folder / name).read_text())


def load_predictors(folder):
    from safetensors.torch import load_file

    return [load_file(folder / f"model_{layer}.safetensors") for layer in range(3)]


def plain_masked(model, predictors, exact_layers, tokens):
    """Logits [n, vocabulary] of one sequence, and per layer (kept, fires), by the rule of docs/format.md 5."""
    seen = []
    residual = {}

    def make_tap(layer):
        def tap(_, args):
            logits = torch.relu(residual[layer] @ predictors[layer]["fc1.weight"].float().T)
            kept = (logits @ predictors[layer]["fc2.weight"].float().T) >= 0.0
            kept[:, :SINK_POSITIONS] = True
            if exact_layers[layer]:
                kept[:] = True
            seen.append((kept[0, 1:], args[0][0, 1:] != 0))
            return args[0] * kept

        return tap

    handles = []
    for layer, block in enumerate(model.model.model.layers):
        norm = block.post_attention_layernorm
        handles.append(
            norm.register_forward_pre_hook(
                lambda _, args, layer=layer: residual.__setitem__(layer, args[0])
            )
        )
        handles.append(block.mlp.down_proj.register_forward_pre_hook(make_tap(layer)))
    with torch.no_grad():
        logits = model.model(torch.as_tensor(tokens[None].astype(np.int64))).logits[0]
    for handle in handles:
        handle.remove()
    return logits, seen


def held_out(settings, checkpoint):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    encoder = text_encoder(tokenizer, None)
    return read_texts(settings, TokenStore(settings, encoder, checkpoint / "tokens")).test


def test_the_report_is_what_a_plain_loop_measures(train, small, sparse_model, sparse_checkpoint):
    trained = train()
    blocks = held_out(small(), sparse_checkpoint)
    predictors, config = load_predictors(trained.folder), read(trained.folder, "config.json")
    loss, plain_loss, n, hits, kept_sum, fires_sum = 0.0, 0.0, 0, 0, 0, 0
    for block in blocks:
        logits, seen = plain_masked(sparse_model, predictors, config["exact_layers"], block)
        with torch.no_grad():
            plain = sparse_model.model(torch.as_tensor(block[None].astype(np.int64))).logits[0]
        targets = torch.from_numpy(block[1:].astype(np.int64))
        for values, which in ((logits, 0), (plain, 1)):
            nll = float(torch.nn.functional.cross_entropy(values[:-1], targets, reduction="sum"))
            loss, plain_loss = loss + nll * (which == 0), plain_loss + nll * (which == 1)
        n += len(targets)
        hits += sum(int((kept & fires).sum()) for kept, fires in seen)
        kept_sum += sum(int(kept.sum()) for kept, _ in seen)
        fires_sum += sum(int(fires.sum()) for _, fires in seen)
    overall = read(trained.folder, "report.json")["targets"][0]["overall"]
    rise = np.expm1((loss - plain_loss) / n)
    assert overall["unmasked_perplexity"] == pytest.approx(np.exp(plain_loss / n), rel=1e-5)
    assert overall["perplexity_loss"] == pytest.approx(rise, abs=1e-4)  # a flip near the threshold
    assert overall["recall"] == pytest.approx(hits / fires_sum, abs=1e-3)
    assert overall["precision"] == pytest.approx(hits / kept_sum, abs=1e-3)
    neurons = 3 * sparse_model.n_ff * n
    assert overall["predicted_density"] == pytest.approx(kept_sum / neurons, abs=1e-3)
    assert not any(config["exact_layers"])
    parameters = 8 * (48 + 160) / (3 * 48 * 160)
    f = parameters + kept_sum / neurons / 3 + 2 / 3 * hits / neurons
    assert overall["bytes"] == pytest.approx(f, abs=1e-3)
    for name in ("recall", "perplexity_loss"):
        assert config[name] == overall[name]
    assert config["density"] == overall["predicted_density"]
    assert config["sparse_threshold"] == 0.0


def test_the_allowance_is_kept_on_the_calibration_text_and_nearly_on_the_test_text(train):
    """The texts are 1,600 tokens each, whose rises of the perplexity differ by a percent or two."""
    overall = train().result.measures.overall()
    assert 0.0 < overall["perplexity_loss"] < 0.06


def test_training_beats_singular_vectors_at_equal_parameters(train):
    trained = train().result.measures.overall()
    singular = train(predictor_init="svd", num_train_epochs=0, exact_layers=False)
    baseline = singular.result.measures.overall()
    assert trained["parameters"] == pytest.approx(baseline["parameters"])
    assert trained["bytes"] < 0.8 * baseline["bytes"]
    assert trained["perplexity_loss"] < baseline["perplexity_loss"] + 0.01


@pytest.mark.parametrize("loss", ["contribution", "uniform"])
def test_cheap_costs_train_too(train, loss):
    overall = train(predictor_loss=loss, num_train_epochs=3).result.measures.overall()
    exact = 1 / 3 + 2 / 3 * overall["true_density"]
    assert overall["bytes"] < 0.95 * exact
    assert overall["recall"] > 0.8


def test_of_several_ranks_the_best_are_kept_within_the_budget(train):
    trained = train(predictor_rank=[4, 8, 24], predictor_budget=0.1, num_train_epochs=2)
    report = read(trained.folder, "report.json")["targets"][0]
    assert set(report["ranks"]) <= {0, 4, 8, 24}
    assert report["overall"]["parameters"] <= 0.1
    ranks = [len(tensors["fc1.weight"]) for tensors in load_predictors(trained.folder)]
    assert ranks == [rank or 32 for rank in report["ranks"]]


def test_a_budget_that_no_rank_keeps_is_refused(small, sparse_checkpoint, statistics, tmp_path):
    settings = small(predictor_rank=[8], predictor_budget=0.01, exact_layers=False)
    with pytest.raises(PiError, match=r"rank 8 takes 7\.2% of the FFN's parameters"):
        train.train_predictors(str(sparse_checkpoint), statistics, tmp_path, settings)


def test_the_directory_says_what_it_was_made_from(train, statistics, sparse_checkpoint):
    trained = train(upstream=True, num_train_epochs=1)
    names = {path.name for path in trained.folder.iterdir()}
    layers = {f"model_{layer}.{kind}" for layer in range(3) for kind in ("safetensors", "pt")}
    assert names == layers | {"config.json", "report.json", "manifest.json"}  # and no token_dir
    manifest = Manifest.from_json(
        (trained.folder / "manifest.json").read_text(), where=trained.folder
    )
    assert (
        manifest.origins["weights"].sha256 == read(trained.folder, "config.json")["source_sha256"]
    )
    assert manifest.origins["activations"].sha256 == statistics.counts_sha256()
    for layer, tensors in enumerate(load_predictors(trained.folder)):
        torch_file = torch.load(trained.folder / f"model_{layer}.pt")
        assert all(torch.equal(torch_file[name], tensor) for name, tensor in tensors.items())


class Killed(BaseException):
    """What no handler of errors catches."""


def test_a_killed_run_resumes_after_the_last_group(
    small, sparse_checkpoint, statistics, tmp_path, monkeypatch
):
    settings = small(layers_per_group=1, num_train_epochs=1)
    whole = tmp_path / "whole"
    train.train_predictors(str(sparse_checkpoint), statistics, whole, settings)
    inner, trained = groups.train_group, []

    def killed_at_second(context, blocks, layers, whitening):
        if len(trained) == 1:
            raise Killed
        trained.append(layers)
        return inner(context, blocks, layers, whitening)

    monkeypatch.setattr(groups, "train_group", killed_at_second)
    resumed = tmp_path / "resumed"
    with pytest.raises(Killed):
        train.train_predictors(str(sparse_checkpoint), statistics, resumed, settings)
    assert not (resumed / "config.json").exists()

    def counted(context, blocks, layers, whitening):
        trained.append(layers)
        return inner(context, blocks, layers, whitening)

    monkeypatch.setattr(groups, "train_group", counted)
    train.train_predictors(str(sparse_checkpoint), statistics, resumed, settings)
    assert trained == [[0], [1], [2]]
    for mine, theirs in zip(load_predictors(resumed), load_predictors(whole), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    reports = [read(folder, "report.json") for folder in (resumed, whole)]
    assert all(report.pop("train_seconds") > 0 for report in reports)
    assert reports[0] == reports[1]


def test_other_settings_do_not_resume(small, sparse_checkpoint, statistics, tmp_path, monkeypatch):
    def killed(*_):
        raise Killed

    monkeypatch.setattr(train, "Selector", killed)
    with pytest.raises(Killed):
        train.train_predictors(
            str(sparse_checkpoint), statistics, tmp_path, small(num_train_epochs=1)
        )
    with pytest.raises(PiError, match="a run with other settings"):
        train.train_predictors(
            str(sparse_checkpoint), statistics, tmp_path, small(num_train_epochs=1, seed=3)
        )


def test_a_loss_that_is_no_number_is_an_error(small, sparse_checkpoint, statistics, tmp_path):
    settings = small(learning_rate=1e30, num_train_epochs=1)
    with pytest.raises(PiError, match=r"the loss of layer \d is nan|inf") as caught:
        train.train_predictors(str(sparse_checkpoint), statistics, tmp_path, settings)
    assert "learning_rate" in caught.value.hint
    assert not (tmp_path / "config.json").exists()


def broken_statistics(statistics, how):
    from copy import deepcopy

    tally, origins = deepcopy(statistics.tally), dict(statistics.manifest.origins)
    if how == "weights":
        origins["weights"] = Origin("other", sha256="0" * 64)
    elif how == "shape":
        tally.counts = tally.counts[:, :-1]
    elif how == "never":
        tally.counts[1] = 0
    elif how == "always":
        tally.counts[2] = tally.tokens
    manifest = Manifest(statistics.manifest.kind, origins, {})
    return ActivationStatistics(tally, manifest, in_file_order=how == "order")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("weights", "those of another model, other with"),
        ("shape", r"another model, tiny with \[3, 159\] neurons"),
        ("order", "as in a hot-first model file"),
        ("never", "layer 1 never fires"),
        ("always", "layer 2 always fires"),
    ],
)
def test_statistics_that_are_refused(small, sparse_checkpoint, statistics, tmp_path, how, said):
    with pytest.raises(PiError, match=said):
        train.train_predictors(
            str(sparse_checkpoint), broken_statistics(statistics, how), tmp_path, small()
        )


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--calibration_tokens", "640"), 1, "640 tokens are too few for the calibration text"),
        (("--held_out_share", "0.000001"), 1, "held out for calibration"),
        (("--predictor_rank", "[1]"), 2, "a rank below 2"),
        (("--predictor_rank", "[]"), 2, "predictor_rank is empty"),
        (("--byte_price", "-1"), 2, "byte_price is -1"),
        (("--predictor_loss", "recall"), 2, "choose gradient, contribution, uniform"),
        (("--lerning_rate", "1"), 2, "lerning_rate"),
    ],
)
def test_wrong_settings(sparse_checkpoint, statistics, tmp_path, capsys, flags, code, said):
    statistics.save(tmp_path / "statistics.safetensors")
    data = ("--dataset_mixture", yaml.safe_dump(text_of(sparse_checkpoint)), "--max_length", "64")
    data += ("--held_out_share", "0.25")
    files = (sparse_checkpoint, tmp_path / "statistics.safetensors", tmp_path / "out")
    try:
        found = main([*map(str, files), *data, *flags])
    except SystemExit as stop:  # argparse
        found = stop.code
    assert found == code
    assert said in capsys.readouterr().err


def test_the_command_prints_a_table_and_keeps_what_is_there(
    sparse_checkpoint, statistics, tmp_path, capsys
):
    statistics.save(tmp_path / "statistics.safetensors")
    (tmp_path / "settings.yaml").write_text(
        yaml.safe_dump({"dataset_mixture": text_of(sparse_checkpoint)})
        + "held_out_share: 0.25\nmax_length: 64\nmax_tokens: 4096\n"
        "calibration_tokens: 1024\ntest_tokens: 1024\npredictor_rank: [4]\npredictor_batch_tokens: 512\n"
        "train_predictor: 3\n"
    )
    command = [str(sparse_checkpoint), str(tmp_path), str(tmp_path / "out")]
    command += ["--config", str(tmp_path / "settings.yaml")]
    assert main(command) == 2
    assert "unknown key train_predictor" in capsys.readouterr().err
    text = (tmp_path / "settings.yaml").read_text().replace("train_predictor: 3\n", "")
    (tmp_path / "settings.yaml").write_text(text)
    assert main([*command, "--max_tokens", "12288"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["layer", "rank", "recall", "precision"]
    assert lines[4].split()[0] == "all"
    assert "position 0 exact" in lines[5]
    assert main(command) == 1
    assert "holds predictors already" in capsys.readouterr().err
