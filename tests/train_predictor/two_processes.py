"""What test_processes.py runs in one process and in two: python two_processes.py CHECKPOINT OUT BLOCKS TOKENS."""

from __future__ import annotations

import sys
from pathlib import Path

from powerinfer_toolkit.profile_activations.profile import profile
from powerinfer_toolkit.profile_activations.settings import ProfileSettings
from powerinfer_toolkit.train_predictor.settings import PredictorSettings
from powerinfer_toolkit.train_predictor.train import train_predictors
from powerinfer_toolkit.training.sources import DataSource

checkpoint, output = sys.argv[1], Path(sys.argv[2])
blocks, tokens = int(sys.argv[3]), int(sys.argv[4])
text = [DataSource(path=f"{checkpoint}/text.jsonl")]
statistics = profile(
    checkpoint,
    output / "statistics",
    ProfileSettings(dataset_mixture=text, max_length=64, per_device_batch_size=5, save_steps=3),
)
train_predictors(
    checkpoint,
    statistics,
    output / "predictors",
    PredictorSettings(
        dataset_mixture=text,
        held_out_share=0.25,
        max_length=64,
        per_device_batch_size=blocks,
        predictor_batch_tokens=tokens,
        predictor_rank=[8],
        predictor_budget=0.3,
        byte_price=0.1,
        predictor_loss="uniform",  # draws no labels, so that one process sees what two see
        calibration_tokens=1600,
        test_tokens=1600,
        exact_layers=False,
    ),
)
