"""Pictures of activation statistics: who carries the activations, how sparse each layer is, where hot neurons are."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.statistics import HOT_SHARE, ActivationStatistics

_INCHES = (7.0, 4.5)
_DPI = 150
_COLOURS = "viridis"


def write_plots(statistics: ActivationStatistics, directory: Path, suffix: str) -> Iterator[Path]:
    """Write activation_cdf, zero_share and hot_neurons as `suffix` (png, svg) files; yield their paths.

    Raises PiError without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise PiError("--plot needs matplotlib", hint="pip install 'powerinfer-toolkit[plot]'")
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[Any, ActivationStatistics], None]] = {
        "activation_cdf": _activation_cdf,
        "zero_share": _zero_share,
        "hot_neurons": _hot_neurons,
    }
    for name, draw in plots.items():
        figure = Figure(figsize=_INCHES, layout="constrained")
        draw(figure, statistics)
        path = directory / f"{name}.{suffix}"
        figure.savefig(path, dpi=_DPI)
        yield path


def _activation_cdf(figure: Any, statistics: ActivationStatistics) -> None:  # noqa: ANN401
    """Draw for each layer the share of its activations that its hottest neurons carry."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    falling = -np.sort(-statistics.tally.counts, axis=1)
    carried = np.cumsum(falling, axis=1) / np.maximum(falling.sum(axis=1, keepdims=True), 1)
    n_layers, n_ff = carried.shape
    share = np.arange(n_ff + 1) / n_ff
    colours: Any = ScalarMappable(
        Normalize(0, max(n_layers - 1, 1)), matplotlib.colormaps[_COLOURS]
    )
    axes = figure.subplots()
    for layer, curve in enumerate(carried):
        axes.plot(share, np.append(0.0, curve), color=colours.to_rgba(layer), linewidth=1)
    axes.axhline(HOT_SHARE, color="grey", linestyle=":", linewidth=1)
    axes.set(
        xlabel="share of the layer's neurons, hottest first",
        ylabel="share of the layer's activations",
        title=f"Activation CDF, {statistics.n_tokens:,} tokens",
        xlim=(0, 1),
        ylim=(0, 1.01),
    )
    figure.colorbar(colours, ax=axes, label="layer")


def _zero_share(figure: Any, statistics: ActivationStatistics) -> None:  # noqa: ANN401
    """Draw the share of zeros by layer, and their mean."""
    zeros = statistics.zero_share()
    axes = figure.subplots()
    axes.bar(np.arange(zeros.size), zeros, color="tab:blue", width=0.8)
    axes.axhline(zeros.mean(), color="black", linestyle="--", linewidth=1)
    axes.annotate(
        f"mean {zeros.mean():.1%}",
        (zeros.size - 0.5, zeros.mean()),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        annotation_clip=False,
    )
    axes.set(xlabel="layer", ylabel="share of activations that are 0", ylim=(0, 1))
    axes.set_xlim(-0.5, zeros.size - 0.5)
    axes.set_title(f"Zeros by layer, {statistics.n_tokens:,} tokens")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _hot_neurons(figure: Any, statistics: ActivationStatistics) -> None:  # noqa: ANN401
    """Draw how often each neuron fires: one row a layer, its neurons by falling frequency."""
    frequency = -np.sort(-statistics.frequency(), axis=1)
    axes = figure.subplots()
    image = axes.imshow(
        frequency,
        aspect="auto",
        interpolation="nearest",
        cmap="magma",
        vmin=0,
        vmax=1,
        extent=(0, 1, frequency.shape[0] - 0.5, -0.5),
    )
    axes.set(
        xlabel="share of the layer's neurons, hottest first",
        ylabel="layer",
        title=f"How often neurons fire, {statistics.n_tokens:,} tokens",
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, label="share of the tokens")
