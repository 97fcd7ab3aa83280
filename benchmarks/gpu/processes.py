"""What a killed process leaves behind, and whether two share a GPU, on a GPU that nothing else uses.

    PYTHONPATH=src PI_LIB=... python benchmarks/gpu/processes.py FILE --budget 4

- pi-run is killed (SIGKILL) while it decodes. Within 5 s the device has in use what it had before, and there is no new
  file in the folder for temporary ones or in /dev/shm.
- Two of them at once, each under the budget: both say what one alone says (temperature 0), and the device's peak is
  within both budgets together.

Exit code 1 where that is not so.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nvml import Nvml

GIB = 2**30
ALLOWED_BYTES = 8 * 2**20
RELEASE_SECONDS = 5.0
SAMPLE_SECONDS = 0.002


class Runs:
    """Runs of pi-run on one file under one budget, with a folder of their own for temporary files."""

    def __init__(self, model: str, budget: float, folder: Path) -> None:
        self._command = [sys.executable, "-m", "powerinfer_toolkit.runtime.cli", "-q", "-m", model]
        self._command += ["--vram-budget", f"{budget}GiB", "-p", "a", "--temp", "0", "--ignore-eos"]
        self._environment = os.environ | {"TMPDIR": str(folder)}

    def start(self, n_tokens: int) -> subprocess.Popen[bytes]:
        """Begin to decode; the text comes through a pipe, unbuffered."""
        return subprocess.Popen(
            [*self._command, "-n", str(n_tokens)],
            env=self._environment,
            stdout=subprocess.PIPE,
            bufsize=0,
        )


def files_in(*folders: Path) -> set[Path]:
    """What lies in the folders."""
    return {path for folder in folders for path in folder.iterdir()}


def kill_one(runs: Runs, nvml: Nvml, folder: Path) -> bool:
    """Kill one in mid-run; whether nothing is left of it."""
    folders = (folder, Path("/dev/shm"))
    files, before = files_in(*folders), nvml.used_bytes()
    with runs.start(100_000) as run:
        assert run.stdout is not None
        run.stdout.read(1)
        run.send_signal(signal.SIGKILL)
    end = time.monotonic() + RELEASE_SECONDS
    while (grown := nvml.used_bytes() - before) > ALLOWED_BYTES and time.monotonic() < end:
        time.sleep(SAMPLE_SECONDS)
    new = files_in(*folders) - files
    took = RELEASE_SECONDS - (end - time.monotonic())
    print(f"killed: device {grown / 2**20:+.1f} MiB after {took:.2f} s, new files: {len(new)}")
    return grown <= ALLOWED_BYTES and not new and run.returncode == -signal.SIGKILL


def run_two(runs: Runs, nvml: Nvml, budget_bytes: float) -> bool:
    """Whether two at once say what one alone says, within their budgets."""
    alone = runs.start(48).communicate()[0]
    before = peak = nvml.used_bytes()
    both = [runs.start(48) for _ in range(2)]
    while any(run.poll() is None for run in both):
        peak = max(peak, nvml.used_bytes())
        time.sleep(SAMPLE_SECONDS)
    texts = [run.communicate()[0] for run in both]
    same, within = texts == [alone, alone], peak - before <= 2 * budget_bytes
    print(
        f"two at once: exit codes {[run.returncode for run in both]}, text of {len(alone)} bytes "
        f"{'as alone' if same else 'DIFFERS'}, peak {(peak - before) / GIB:.2f} of {2 * budget_bytes / GIB:.2f} GiB"
    )
    return same and within and len(alone) > 0 and all(run.returncode == 0 for run in both)


def main() -> int:
    """Do both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--budget", type=float, required=True, help="GiB of each process")
    args = parser.parse_args()
    nvml = Nvml()
    with tempfile.TemporaryDirectory() as name:
        runs = Runs(args.model, args.budget, Path(name))
        nothing_left = kill_one(runs, nvml, Path(name))
        shared = run_two(runs, nvml, args.budget * GIB)
    return 0 if nothing_left and shared else 1


if __name__ == "__main__":
    sys.exit(main())
