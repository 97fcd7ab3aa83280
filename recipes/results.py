"""The table at the end of a run: what sparsity costs in perplexity and brings in bytes and speed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from powerinfer_toolkit.recipes.stages import Run
from powerinfer_toolkit.statistics import ActivationStatistics

DECODED_TOKENS, REPETITIONS = 64, 5  # of a speed
GATE_SHARE = 1 / 3  # of an FFN's bytes, which exact mode reads in full
COLUMNS = ("mode", "perplexity", "decode tok/s", "zero share", "FFN bytes", "file")


@dataclass(frozen=True)
class Row:
    """One FFN mode of a file; `ffn_bytes` are those read at a token, relative to dense."""

    mode: str
    perplexity: float
    decode_tok_s: float
    zero_share: float | None
    ffn_bytes: float
    file: str
    file_bytes: int

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, by COLUMNS."""
        zeros = "-" if self.zero_share is None else f"{self.zero_share:.1%}"
        return (
            self.mode,
            f"{self.perplexity:.2f}",
            f"{self.decode_tok_s:.1f}",
            zeros,
            f"{self.ffn_bytes:.3f}",
            f"{self.file_bytes / 1e6:,.1f} MB",
        )


@dataclass(frozen=True)
class Results:
    """What a finished run has to show; `report` is verify's, `machine` where the speeds were measured."""

    rows: list[Row]
    report: dict[str, Any]
    machine: dict[str, Any]

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"table": [asdict(row) for row in self.rows], "machine": self.machine, **self.report}

    def to_text(self) -> str:
        """Return the table in columns."""
        lines = [COLUMNS, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines
        )

    def to_markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1)), *(r.cells() for r in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def collect(run: Run) -> Results:
    """Return the results of a run whose stages are all finished."""
    report = json.loads(run.report.read_text(encoding="utf-8"))
    speeds, found = report["decode_tok_s"], report["model"]["perplexity"]
    dense = report[
        "dense"
    ]  # its mode is exact, which loses nothing, where the source is ReLU already
    zero_share = float(ActivationStatistics.load(run.statistics).zero_share().mean())
    exact_bytes = GATE_SHARE + (1 - GATE_SHARE) * (1 - zero_share)

    def row(mode: str, perplexity: float, zeros: float | None, ffn_bytes: float, file: Path) -> Row:
        size = file.stat().st_size
        return Row(mode, perplexity, speeds[mode], zeros, ffn_bytes, file.name, size)

    rows = [
        row("dense", dense["perplexity"][dense["ffn_mode"]], None, 1.0, run.dense),
        row("exact", found["exact"], zero_share, exact_bytes, run.model),
    ]
    if "predicted" in found and run.predictors is not None:
        trained = json.loads((run.predictors / "report.json").read_text(encoding="utf-8"))
        ffn_bytes = trained["targets"][0]["overall"]["bytes"]
        rows.append(row("predicted", found["predicted"], zero_share, ffn_bytes, run.model))
    return Results(rows, {name: report[name] for name in ("model", "dense")}, report["machine"])
