"""What pi-bench prints: one row a test as text, Markdown or JSON, and warnings where a figure says little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from powerinfer_toolkit import console
from powerinfer_toolkit.runtime.plan.bandwidth import Bandwidth
from powerinfer_toolkit.runtime.plan.machine import last_level_cache_bytes

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
_MODEL, _MODEL_WIDTH = "model", 32


class Report:
    """Prints rows as they come; `several` models have their names in the first column, as Markdown always does."""

    def __init__(self, bandwidth: Bandwidth | None, *, markdown: bool, several: bool) -> None:
        self._bandwidth = bandwidth
        self._markdown = markdown
        self._named = several or markdown
        self._begun = False
        self._warned = False

    def print_row(self, result: Result) -> None:
        """Print one row, the first one with its header."""
        titles = ([_MODEL] if self._named else []) + list(_COLUMNS)
        if not self._begun:
            self._begun = True
            self._print(titles)
            if self._markdown:
                self._print(["---"] * len(titles))
            self._say_bandwidth()
        self._print(([result.model] if self._named else []) + _cells(result))

    def record(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the JSON object."""
        record: dict[str, Any] = {"results": [asdict(result) for result in results]}
        if self._bandwidth is not None:
            record["read_bytes_per_second"] = self._bandwidth.bytes_per_second
            record["read_threads"] = self._bandwidth.best_threads
            record["read_measured_on"] = self._bandwidth.measured_on
        return record

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
        if self._bandwidth is not None:
            console.info(
                f"memory is read at {self._bandwidth.bytes_per_second / 1e9:.1f} GB/s by "
                f"{self._bandwidth.best_threads} threads, measured on {self._bandwidth.measured_on}"
            )

    def _print(self, cells: list[str]) -> None:
        if self._markdown:
            print("| " + " | ".join(cells) + " |", flush=True)
            return
        widths = ([_MODEL_WIDTH] if self._named else []) + list(_COLUMNS.values())
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


def _number(value: float | None, unit: float, digits: int) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"
