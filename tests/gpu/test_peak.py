"""The budget against what the driver says of the device, and nothing left behind (GPU only; the device is idle)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime.synth.write import SynthSettings, write_synth

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ROOT / "benchmarks" / "gpu" / "budget_sweep.py"


@pytest.mark.gpu
def test_the_peak_is_within_the_budget(tmp_path: Path) -> None:
    """Of two layers of the 7b shape (0.9 GB) from a budget that holds one layer to one that holds everything."""
    path = tmp_path / "7b.gguf"
    write_synth(SynthSettings("7b", path, TensorType.F16, n_layers=2))
    sweep = ["--from", "1.2", "--to", "3.0", "--steps", "3"]
    bench = ["-p", "64", "-n", "16", "-r", "1"]
    said = subprocess.run(
        [sys.executable, str(SWEEP), str(path), *sweep, *bench],
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stdout.count("tg16") >= 2, said.stdout
