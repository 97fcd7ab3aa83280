"""Zero share against held-out perplexity.

usage: plot.py zeros_perplexity.csv OUT.svg      rows of benchmarks/RESULTS.md
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from matplotlib import pyplot


def main(source: str, target: str) -> None:
    runs: dict[str, list[tuple[float, float]]] = {}
    with open(source, newline="") as file:
        for row in csv.DictReader(file):
            point = 100 * float(row["zero_share"]), float(row["perplexity"])
            runs.setdefault(row["run"], []).append(point)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for number, (run, points) in enumerate(runs.items()):
        zeros, perplexities = zip(*points, strict=True)
        if any(zeros):
            axes.plot(zeros, perplexities, marker="o", label=run, color=f"C{number}")
        else:
            axes.axhline(perplexities[0], linestyle="--", label=run, color=f"C{number}")
    axes.set_xlabel("zeros in the FFN's hidden state, %")
    axes.set_ylabel("held-out perplexity")
    axes.set_title("SmolLM2-135M, one H200")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})
    lines = Path(target).read_text(encoding="utf-8").splitlines()
    Path(target).write_text("".join(line.rstrip() + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
