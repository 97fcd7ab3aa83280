"""What the sides of every layer did while a text was decoded: means over steps, by the clocks of either side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from powerinfer_toolkit.runtime.engine import LayerTimes
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.plan.plan import LayerPlace, Side, layer_places

_TIMES = ("gpu", "pull", "gpu_wait", "handover", "cpu", "cpu_wait")  # LayerTimes, less _ns
_TITLES = ("layer", "side", "GPU us", "pull", "waits", "handover", "CPU us", "waits", "waited")


def times_record(model: Model) -> list[dict[str, Any]]:
    """Return the mean times of every layer in seconds, and which side waited longer; [] where nothing was timed."""
    places = layer_places(model.plan.units, model.config.n_layers)
    timed = zip(places, model.engine.layer_times(), strict=True)
    return [_row(place, times) for place, times in timed if times.n_steps]


def _row(place: LayerPlace, times: LayerTimes) -> dict[str, Any]:
    means = {
        f"{name}_seconds": getattr(times, f"{name}_ns") / times.n_steps / 1e9 for name in _TIMES
    }
    # The way there and back is nobody's wait for the other's work.
    for_cpu = times.gpu_wait_ns - times.handover_ns
    waited = "GPU" if for_cpu > times.cpu_wait_ns else "CPU"
    side = {"layer": place.layer, "side": str(place.side)}
    return side | means | {"waited": waited if place.side is Side.SPLIT else None}


def times_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a table of times_record, and a line of sums; nothing without rows."""
    if not rows:
        return
    yield " ".join(f"{title:>8}" for title in _TITLES)
    for row in rows:
        times = [f"{row[f'{name}_seconds'] * 1e6:.0f}" for name in _TIMES]
        cells = [str(row["layer"]), row["side"], *times, row["waited"] or "-"]
        yield " ".join(f"{cell:>8}" for cell in cells)
    sums = {name: 1e3 * sum(row[f"{name}_seconds"] for row in rows) for name in _TIMES}
    yield (
        f"a token's layers: GPU {sums['gpu']:.2f} ms, pulling {sums['pull']:.2f}, waiting {sums['gpu_wait']:.2f}, of "
        f"that handing over {sums['handover']:.2f}; CPU {sums['cpu']:.2f} ms, waiting {sums['cpu_wait']:.2f}"
    )
