"""Statistics as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from powerinfer_toolkit.gguf_format import UNION_WINDOWS
from powerinfer_toolkit.statistics import ALWAYS_ON_SHARE, EXCLUDED, HOT_SHARE, ActivationStatistics

COLUMNS = {
    "zero_share": "zeros",
    "hot_share": f"carry {HOT_SHARE:.0%}",
    "overlap": "overlap",
    **{f"union_{n}": f"{n} tok" for n in UNION_WINDOWS},
}


def rows(statistics: ActivationStatistics) -> dict[str, list[float]]:
    """Return every measure by layer; a union density without a whole window is NaN."""
    unions = statistics.union_density().T
    return {
        "zero_share": statistics.zero_share().tolist(),
        "hot_share": statistics.hot_share().tolist(),
        "overlap": statistics.overlap().tolist(),
        **{f"union_{n}": row.tolist() for n, row in zip(UNION_WINDOWS, unions, strict=True)},
        "dead": statistics.dead().tolist(),
        "always_on": statistics.always_on().tolist(),
    }


def to_json(statistics: ActivationStatistics) -> str:
    """Return one object: tokens, means over layers, and every measure by layer; null where unknown."""
    by_layer = rows(statistics)
    record: dict[str, Any] = {
        "tokens": statistics.n_tokens,
        "excluded": EXCLUDED,
        "neuron_order": "file" if statistics.in_file_order else "original",
        "mean": {name: _known(float(np.mean(values))) for name, values in by_layer.items()},
        "layers": {name: [_known(value) for value in values] for name, values in by_layer.items()},
        "manifest": json.loads(statistics.manifest.to_json()),
    }
    return json.dumps(record)


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def to_text(statistics: ActivationStatistics) -> str:
    """Return a table with one line a layer, and what its columns mean."""
    by_layer = rows(statistics)
    n_layers, n_ff = statistics.tally.counts.shape
    lines = [
        f"{statistics.n_tokens} tokens ({EXCLUDED} not counted), {n_layers} layers of {n_ff} neurons",
        _line("layer", list(COLUMNS.values()), ["dead", "on"]),
    ]
    for layer in range(n_layers):
        shares = [_percent(by_layer[name][layer]) for name in COLUMNS]
        counts = [str(by_layer[name][layer]) for name in ("dead", "always_on")]
        lines.append(_line(str(layer), shares, counts))
    means = [_percent(float(np.mean(by_layer[name]))) for name in COLUMNS]
    sums = [str(int(np.sum(by_layer[name]))) for name in ("dead", "always_on")]
    lines.append(_line("all", means, sums))
    lines += [
        "",
        f"zeros: mean share of activations that are 0; carry {HOT_SHARE:.0%}: least share of the neurons with that "
        "share of the activations;",
        "overlap: neurons active at both over those active at either of two consecutive tokens; N tok: share of the "
        "neurons",
        f"active at least once in N consecutive tokens; dead: never active; on: active at {ALWAYS_ON_SHARE:.0%} of the "
        "tokens or more.",
    ]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return "-" if np.isnan(share) else f"{share:.1%}"


def _line(first: str, shares: list[str], counts: list[str]) -> str:
    return (
        f"{first:>5} "
        + " ".join(f"{cell:>9}" for cell in shares)
        + "".join(f" {cell:>6}" for cell in counts)
    )
