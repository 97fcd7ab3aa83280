"""Decode speed and peak device memory of a model under rising VRAM budgets, on a GPU that nothing else uses.

    PYTHONPATH=src PI_LIB=... python benchmarks/gpu/budget_sweep.py FILE --from 1 --to 26 --steps 12 [pi-bench flags]

The peak is what the driver says of the whole device (NVML), sampled while pi-bench runs, less what was used before:
context, weights, KV cache and scratch. Exit code 1 if a peak is above its budget; 2 where NVML is missing. A budget
below the least that runs is reported with the least and skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass

from nvml import Nvml

GIB = 2**30
SAMPLE_SECONDS = 0.002
DOES_NOT_FIT = 3  # exit code of pi-bench


@dataclass(frozen=True)
class Run:
    """One budget: exit code, what pi-bench printed, and the most that the device had in use meanwhile."""

    code: int
    out: str
    err: str
    peak_bytes: int


def run(nvml: Nvml, budget_bytes: int, flags: list[str]) -> Run:
    """Run pi-bench under a budget and watch the device."""
    before = peak = nvml.used_bytes()
    command = [sys.executable, "-m", "powerinfer_toolkit.runtime.bench", "--json", "-q"]
    budget = f"{budget_bytes // 2**20}MiB"
    with subprocess.Popen(
        [*command, "--vram-budget", budget, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as bench:
        while bench.poll() is None:
            peak = max(peak, nvml.used_bytes())
            time.sleep(SAMPLE_SECONDS)
        out, err = bench.communicate()
    return Run(bench.returncode, out, err, peak - before)


def main() -> int:
    """Sweep; print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--from", dest="low", type=float, required=True, help="GiB")
    parser.add_argument("--to", dest="high", type=float, required=True, help="GiB")
    parser.add_argument("--steps", type=int, default=12)
    args, flags = parser.parse_known_args()
    try:
        nvml = Nvml()
    except OSError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 2
    flags = ["-m", args.model, *(flags or ["-p", "0", "-n", "64", "-r", "3"])]
    worst = 0
    print("| budget GiB | peak GiB | test | tok/s |\n|---|---|---|---|", flush=True)
    for step in range(args.steps):
        share = step / max(args.steps - 1, 1)
        budget_bytes = int((args.low + (args.high - args.low) * share) * GIB)
        worst = max(worst, report(run(nvml, budget_bytes, flags), budget_bytes))
    return worst


def report(found: Run, budget_bytes: int) -> int:
    """Print the rows of one budget; 1 where it was exceeded or pi-bench failed."""
    budget, peak = f"{budget_bytes / GIB:.2f}", f"{found.peak_bytes / GIB:.2f}"
    if found.code == DOES_NOT_FIT:
        print(f"| {budget} | {peak} | {found.err.splitlines()[0]} | - |", flush=True)
        return int(found.peak_bytes > budget_bytes)
    if found.code != 0:
        print(found.err, file=sys.stderr)
        return 1
    for row in json.loads(found.out)["results"]:
        print(f"| {budget} | {peak} | {row['test']} | {row['tok_s']:.1f} |", flush=True)
    return int(found.peak_bytes > budget_bytes)


if __name__ == "__main__":
    sys.exit(main())
