"""What pi-bench prints: one row a test as text, Markdown or JSON, and warnings where a figure says little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from powerinfer_toolkit import console
from powerinfer_toolkit.runtime.plan.bandwidth import Bandwidth
from powerinfer_toolkit.runtime.plan.machine import last_level_cache_bytes
from powerinfer_toolkit.runtime.plan.profile import UNMEASURED, MachineProfile

_CACHE_SHARE = 4  # a token that reads fewer last-level caches than this is served by them in part


@dataclass(frozen=True)
class Result:
    """One test of one model at one thread count; what only decoding has is None for prompts.

    Speeds are tokens a second over the repetitions: median, least, largest, sample standard deviation; `spread` is
    (largest - least) / median. `bound_tok_s` is the speed at which `bytes_per_token` would be read at the machine's
    bandwidth, and `bound_share` the part of it that was reached.
    """

    model: str
    test: str
    threads: int
    isa: str
    device: str
    tok_s: float
    tok_s_min: float
    tok_s_max: float
    tok_s_std: float
    spread: float
    ffn_mode: str
    active_share: float
    guessed_share: float
    bytes_per_token: float | None
    bytes_per_second: float | None
    bound_tok_s: float | None
    bound_share: float | None
    peak_rss_bytes: int
    vram_budget_bytes: int
    device_bytes: int


class Rates:
    """How fast the machine reads: its memory by the sweep, the GPU's and what it pulls by the planner's profile."""

    def __init__(self, bandwidth: Bandwidth, measured: MachineProfile | None) -> None:
        self.bandwidth = bandwidth
        self.has_gpu = measured is not None
        fastest = bandwidth.bytes_per_second
        self.profile = replace(measured or UNMEASURED, cpu_bytes_per_second=fastest)

    def record(self) -> dict[str, Any]:
        """Return what the JSON object has of them."""
        found = {
            "read_bytes_per_second": self.bandwidth.bytes_per_second,
            "read_threads": self.bandwidth.best_threads,
            "read_measured_on": self.bandwidth.measured_on,
        }
        return found | ({"profile": asdict(self.profile)} if self.has_gpu else {})

    def __str__(self) -> str:
        """Say them in a line."""
        text = (
            f"memory is read at {self.bandwidth.bytes_per_second / 1e9:.1f} GB/s by "
            f"{self.bandwidth.best_threads} threads, measured on {self.bandwidth.measured_on}"
        )
        if not self.has_gpu:
            return text
        profile = self.profile
        return (
            f"{text}; the GPU reads its own at {profile.gpu_bytes_per_second / 1e9:.0f} GB/s and pulls "
            f"{profile.pull_bytes_per_second / 1e9:.1f} while the CPU reads {profile.cpu_beside_bytes_per_second / 1e9:.1f}"
        )


_COLUMNS = {  # title -> width
    "test": 8,
    "threads": 7,
    "tok/s": 10,
    "spread": 7,
    "ffn": 9,
    "active": 7,
    "MB/token": 9,
    "GB/s": 7,
    "bound": 8,
    "reached": 7,
    "RSS MiB": 8,
}
_GPU_COLUMNS = {"budget": 8, "VRAM MiB": 8}
_MODEL, _MODEL_WIDTH = "model", 32


class Report:
    """Prints rows as they come; `several` models have their names in the first column, as Markdown always does."""

    def __init__(
        self, rates: Rates | None, *, markdown: bool, several: bool, on_gpu: bool = False
    ) -> None:
        self._rates = rates
        self._markdown = markdown
        self._columns = _COLUMNS | (_GPU_COLUMNS if on_gpu else {})
        self._named = several or markdown
        self._begun = False
        self._warned = False

    def print_row(self, result: Result) -> None:
        """Print one row, the first one with its header."""
        titles = ([_MODEL] if self._named else []) + list(self._columns)
        if not self._begun:
            self._begun = True
            self._print(titles)
            if self._markdown:
                self._print(["---"] * len(titles))
            self._say_bandwidth()
        cells = (_cells(result) + _gpu_cells(result))[: len(self._columns)]
        self._print(([result.model] if self._named else []) + cells)

    def record(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the JSON object."""
        record: dict[str, Any] = {"results": [asdict(result) for result in results]}
        return record if self._rates is None else record | self._rates.record()

    def warn(self, result: Result) -> None:
        """Say once where the share of the bound means little."""
        if result.bytes_per_token is None or result.bound_share is None or self._warned:
            return
        cache = last_level_cache_bytes()
        if result.bytes_per_token < _CACHE_SHARE * cache:
            self._warned = True
            console.warning(
                f"a token of {result.model} reads {result.bytes_per_token / 2**20:.0f} MiB, and the last-level cache "
                f"holds {cache / 2**20:.0f} MiB: shares of the bound say little"
            )
        elif result.bound_share > 1:
            self._warned = True
            console.warning(
                f"{result.model} was faster than the bound: the bandwidth was measured on a busier machine; "
                "--measure-bandwidth measures it again"
            )

    def _say_bandwidth(self) -> None:
        if self._rates is not None:
            console.info(str(self._rates))

    def _print(self, cells: list[str]) -> None:
        if self._markdown:
            print("| " + " | ".join(cells) + " |", flush=True)
            return
        widths = ([_MODEL_WIDTH] if self._named else []) + list(self._columns.values())
        pairs = zip(cells, widths, strict=True)
        left = 2 if self._named else 1  # texts are flush left, numbers right
        shown = [f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(pairs)]
        print(" ".join(shown), flush=True)


def _cells(result: Result) -> list[str]:
    return [
        result.test,
        str(result.threads),
        f"{result.tok_s:.2f}",
        f"{result.spread:.1%}",
        result.ffn_mode,
        f"{result.active_share:.1%}",
        _number(result.bytes_per_token, 1e6, 1),
        _number(result.bytes_per_second, 1e9, 2),
        _number(result.bound_tok_s, 1, 2),
        "-" if result.bound_share is None else f"{result.bound_share:.0%}",
        f"{result.peak_rss_bytes / 2**20:.0f}",
    ]


def _gpu_cells(result: Result) -> list[str]:
    sizes = (result.vram_budget_bytes, result.device_bytes)
    return [f"{n_bytes / 2**20:.0f}" if n_bytes else "-" for n_bytes in sizes]


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"
