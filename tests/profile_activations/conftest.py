"""A tiny sparse checkpoint with text, and pi-profile as a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch")

from parity.sparse_checkpoint import text_of, write_sparse_checkpoint
from powerinfer_toolkit.profile_activations.cli import main
from powerinfer_toolkit.statistics import ActivationStatistics


@pytest.fixture(scope="session")
def sparse_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse_checkpoint(tmp_path_factory.mktemp("sparse") / "tiny", n_blocks=24)


@pytest.fixture
def pi_profile() -> Callable[..., int]:
    """pi_profile(model, out, *flags) -> exit code."""

    def run(*arguments: object) -> int:
        return main([str(argument) for argument in arguments])

    return run


@pytest.fixture
def profiled(
    sparse_checkpoint: Path, tmp_path: Path, pi_profile
) -> Callable[..., ActivationStatistics]:
    """profiled(*flags) profiles the checkpoint on its own text into a new directory and reads the result."""

    def profile(*flags: object, text: object = None, name: str = "out") -> ActivationStatistics:
        sources = yaml.safe_dump(text_of(sparse_checkpoint) if text is None else text)
        flags = ("--dataset_mixture", sources, "--held_out_share", 0.01, "--max_length", 64, *flags)
        assert pi_profile(sparse_checkpoint, tmp_path / name, *flags) == 0
        return ActivationStatistics.load(tmp_path / name)

    return profile


@pytest.fixture
def text_flags(sparse_checkpoint: Path) -> tuple[object, ...]:
    """Flags that name the checkpoint's text."""
    sources = yaml.safe_dump(text_of(sparse_checkpoint))
    return ("--dataset_mixture", sources)


@pytest.fixture
def write_texts(tmp_path: Path) -> Callable[[list[str]], list[dict[str, str]]]:
    """write_texts(documents) -> the sources that dataset_mixture names them by."""

    def write(documents: list[str]) -> list[dict[str, str]]:
        path = tmp_path / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        return [{"path": str(path)}]

    return write
