"""pi-profile report: the numbers of a known file as table, JSON and pictures; wrong uses (about 4 s)."""

import json

import numpy as np
import pytest

from powerinfer_toolkit.artifact import Manifest, Origin
from powerinfer_toolkit.statistics import FILE_NAME, KIND, ActivationStatistics, Tally

N_LAYERS, N_FF = 12, 10
TEXT = ("--dataset_mixture", "[{path: README.md}]")


@pytest.fixture
def known(tmp_path):
    """Layer l: neuron 0 always fires, neurons 1 .. 1 + l % 4 half the time, the rest never; 100 tokens."""
    tally = Tally.zeros(N_LAYERS, N_FF)
    for layer in range(N_LAYERS):
        tally.counts[layer, 0] = 100
        tally.counts[layer, 1 : 2 + layer % 4] = 50
    tally.tokens += 100
    tally.both += 50
    tally.either += 200
    tally.windows[:3] = [40, 20, 10]
    tally.unions[:, :3] = [80, 60, 50]
    folder = tmp_path / "out"
    folder.mkdir()
    manifest = Manifest(KIND, {"weights": Origin("tiny")}, {})
    ActivationStatistics(tally, manifest).save(folder / FILE_NAME)
    return folder


def test_json(known, pi_profile, capsys):
    assert pi_profile("report", known, "--json") == 0
    record = json.loads(capsys.readouterr().out)
    layers = record["layers"]
    assert record["tokens"] == 100
    assert layers["zero_share"][:4] == pytest.approx([0.85, 0.80, 0.75, 0.70])
    assert layers["dead"][:4] == [8, 7, 6, 5]
    assert layers["always_on"] == [1] * N_LAYERS
    assert layers["overlap"] == [0.25] * N_LAYERS
    assert [layers[f"union_{n}"][0] for n in (2, 4, 8, 16)] == [0.2, 0.3, 0.5, None]
    # 80% of 150, 200, 250, 300 activations: 2, 3, 3, 4 of ten neurons
    assert layers["hot_share"][:4] == [0.2, 0.3, 0.3, 0.4]
    assert record["mean"]["zero_share"] == pytest.approx(np.mean(layers["zero_share"]))


def test_table(known, pi_profile, capsys):
    assert pi_profile("report", known) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "100 tokens (position 0, BOS and padding not counted), 12 layers of 10"
    )
    assert lines[2].split() == [
        "0",
        "85.0%",
        "20.0%",
        "25.0%",
        "20.0%",
        "30.0%",
        "50.0%",
        "-",
        "-",
        "-",
        "8",
        "1",
    ]
    assert lines[2 + N_LAYERS].split()[:2] == ["all", "77.5%"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures(known, pi_profile, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    plots = tmp_path / "plots"
    assert pi_profile("report", known, "--plot", plots, "--plot-format", suffix) == 0
    names = sorted(path.name for path in plots.iterdir())
    assert names == [f"{name}.{suffix}" for name in ("activation_cdf", "hot_neurons", "zero_share")]
    begin = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert all(path.read_bytes().startswith(begin) for path in plots.iterdir())


def test_what_the_pictures_show(known):
    """The heights of bars and the ends of curves are the statistics."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from powerinfer_toolkit.profile_activations import plots

    statistics = ActivationStatistics.load(known)
    figure = Figure()
    plots._zero_share(figure, statistics)
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(heights, statistics.zero_share())
    figure = Figure()
    plots._activation_cdf(figure, statistics)
    curves = [line.get_ydata() for line in figure.axes[0].lines if len(line.get_ydata()) > 2]
    assert len(curves) == N_LAYERS
    np.testing.assert_allclose(curves[0][:3], [0, 2 / 3, 1])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("report", "OUT", "--max_length", "3"), 2, "a report has no settings"),
        (("MODEL", "OUT", "--json"), 2, "--json and --plot belong to a report"),
        (("report", "NOWHERE"), 1, "does not exist"),
        (("MODEL", "OUT", *TEXT), 1, "exists already"),
        (("MODEL", "NEW", "--max_lenght", "3"), 2, "--max_lenght"),
        (("MODEL", "NEW", *TEXT, "--max_length", "0"), 2, "max_length is 0"),
        (("MODEL", "NEW", *TEXT, "--max_tokens", "9"), 2, "less than a block of 1024"),
        (("MODEL", "NEW"), 2, "dataset_mixture is empty"),
        (("MODEL", "NEW", "--dataset_mixture", "[{path: a, id: b}]"), 2, "give one of the two"),
        (("MODEL", "NEW", "--dataset_mixture", "[{path: nowhere.txt}]"), 1, "no file matches"),
        (("SILU", "NEW", *TEXT), 1, "its neurons are never exactly off"),
    ],
)
def test_wrong_uses(known, sparse_checkpoint, pi_profile, tmp_path, capsys, arguments, code, said):
    names = {
        "OUT": known,
        "MODEL": sparse_checkpoint,
        "NEW": tmp_path / "new",
        "NOWHERE": tmp_path / "x",
    }
    if "SILU" in arguments:
        names["SILU"] = tmp_path / "silu"
        names["SILU"].mkdir()
        config = json.loads((sparse_checkpoint / "config.json").read_text())
        (names["SILU"] / "config.json").write_text(json.dumps(config | {"hidden_act": "silu"}))
    try:
        found = pi_profile(*(names.get(argument, argument) for argument in arguments))
    except SystemExit as stop:  # argparse
        found = stop.code
    assert found == code
    assert said in capsys.readouterr().err
