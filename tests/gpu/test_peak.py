"""The budget against what the driver says of the device, and nothing left behind (GPU only; the device is idle)."""

from __future__ import annotations

import ctypes as ct
import os
import subprocess
import sys
from pathlib import Path

import pytest

from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime.synth.write import SynthSettings, write_synth

ROOT = Path(__file__).resolve().parents[2]
SWEEP = ROOT / "benchmarks" / "gpu" / "budget_sweep.py"
PRODUCTS = ROOT / "benchmarks" / "gpu" / "products_memory.py"


def ways_to_multiply() -> list[str]:
    """cuBLASLt only where it is installed; it is loaded where a driver is."""
    try:
        ct.CDLL("libcuda.so.1")
        ct.CDLL("libcublasLt.so.13")
    except OSError:
        return ["own"]
    return ["own", "cublaslt"]


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", ways_to_multiply())
def test_the_peak_is_within_the_budget(tmp_path: Path, gemm: str) -> None:
    """Of two layers of the 7b shape (0.9 GB) from a budget that holds one layer to one that holds everything."""
    path = tmp_path / "7b.gguf"
    write_synth(SynthSettings("7b", path, TensorType.F16, n_layers=2))
    sweep = ["--from", "1.2", "--to", "3.0", "--steps", "3"]
    bench = ["-p", "64", "-n", "16", "-r", "1"]
    said = subprocess.run(
        [sys.executable, str(SWEEP), str(path), *sweep, *bench],
        env=os.environ | {"PI_GPU_GEMM": gemm},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stdout.count("tg16") >= 2, said.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", ways_to_multiply())
def test_products_take_what_was_counted(gemm: str) -> None:
    """Kernels that are loaded late, and what a library allocates, are within what opening the device counted."""
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    said = subprocess.run(
        [sys.executable, str(PRODUCTS)],
        env=os.environ | {"PI_GPU_GEMM": gemm, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
