"""A tiny sparse checkpoint, its statistics, and predictors trained on it once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from accelerate import Accelerator

from parity.checkpoints import torch
from parity.sparse_checkpoint import N_POSITIONS, text_of, write_sparse_checkpoint
from powerinfer_toolkit.profile_activations.profile import profile
from powerinfer_toolkit.profile_activations.settings import ProfileSettings
from powerinfer_toolkit.statistics import ActivationStatistics
from powerinfer_toolkit.train_predictor.settings import PredictorSettings
from powerinfer_toolkit.train_predictor.train import Result, train_predictors
from powerinfer_toolkit.train_predictor.training import Context
from powerinfer_toolkit.training.checkpoint import SparseModel, load_sparse_model
from powerinfer_toolkit.training.sources import DataSource

SMALL: dict[str, Any] = {
    "max_length": N_POSITIONS,
    "per_device_batch_size": 16,
    "predictor_batch_tokens": 256,
    "predictor_rank": [8],
    "predictor_budget": 0.3,
    "byte_price": 0.1,
    "num_train_epochs": 6,
    "held_out_share": 0.25,
    "calibration_tokens": 1600,
    "test_tokens": 1600,
    "moment_tokens": 8192,
}


def sources(folder: Path) -> list[DataSource]:
    return [DataSource(**source) for source in text_of(folder)]


@pytest.fixture(scope="session")
def sparse_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse_checkpoint(tmp_path_factory.mktemp("sparse") / "tiny", n_blocks=192)


@pytest.fixture(scope="session")
def statistics(
    sparse_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> ActivationStatistics:
    settings = ProfileSettings(dataset_mixture=sources(sparse_checkpoint), max_length=N_POSITIONS)
    return profile(str(sparse_checkpoint), tmp_path_factory.mktemp("statistics"), settings)


@pytest.fixture(scope="session")
def small(sparse_checkpoint: Path) -> Callable[..., PredictorSettings]:
    """small(name=value, ...) returns settings of a training that takes seconds."""
    text = {
        "dataset_mixture": sources(sparse_checkpoint),
        "token_dir": str(sparse_checkpoint / "tokens"),
    }
    return lambda **changes: PredictorSettings(**(text | SMALL | changes))


@pytest.fixture(scope="session")
def sparse_model(sparse_checkpoint: Path) -> SparseModel:
    return load_sparse_model(str(sparse_checkpoint), device=torch.device("cpu"))


@pytest.fixture
def context(
    sparse_model: SparseModel, statistics: ActivationStatistics, small
) -> Callable[..., Context]:
    """context(name=value, ...) returns what the steps of a training need."""

    def make(**changes: object) -> Context:
        frequency = statistics.frequency()
        return Context(sparse_model, Accelerator(), small(**changes), frequency)

    return make


@dataclass
class Trained:
    folder: Path
    result: Result


@pytest.fixture(scope="session")
def train(
    sparse_checkpoint: Path,
    statistics: ActivationStatistics,
    small,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Trained]:
    """train(name=value, ...) trains with these settings, each combination once."""
    made: dict[str, Trained] = {}

    def run(**changes: object) -> Trained:
        key = repr(sorted(changes.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("predictors")
            settings = small(**changes)
            result = train_predictors(str(sparse_checkpoint), statistics, folder, settings)
            made[key] = Trained(folder, result)
        return made[key]

    return run
