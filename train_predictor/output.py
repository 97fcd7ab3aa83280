"""The predictors' directory: one file a layer, config.json with what was measured, report.json, manifest.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from powerinfer_toolkit.artifact import Manifest, Origin, new_file
from powerinfer_toolkit.gguf_format import EXACT_PREDICTOR_RANK
from powerinfer_toolkit.settings import to_mapping
from powerinfer_toolkit.statistics import ActivationStatistics
from powerinfer_toolkit.train_predictor.evaluation import Measures
from powerinfer_toolkit.train_predictor.network import Predictor
from powerinfer_toolkit.train_predictor.settings import PredictorSettings

KIND = "predictors"


def write_predictors(
    output: Path, predictors: Sequence[Predictor | None], n_embd: int, n_ff: int, *, upstream: bool
) -> None:
    """Write model_<layer>.safetensors, and .pt where upstream's converter is to read them.

    A layer that stays exact gets zeros: all its logits are 0, which is the threshold, so that every engine
    computes it in full.
    """
    zeros = Predictor(
        torch.zeros(EXACT_PREDICTOR_RANK, n_embd, dtype=torch.float16),
        torch.zeros(n_ff, EXACT_PREDICTOR_RANK, dtype=torch.float16),
    )
    for layer, found in enumerate(predictors):
        predictor = found or zeros
        tensors = {
            "fc1.weight": predictor.fc1.cpu().contiguous(),
            "fc2.weight": predictor.fc2.cpu().contiguous(),
        }
        with new_file(output / f"model_{layer}.safetensors", force=True) as path:
            path.write_bytes(save(tensors))
        if upstream:
            with new_file(output / f"model_{layer}.pt", force=True) as path:
                torch.save(tensors, path)


def write_config(
    output: Path,
    measures: Measures,
    predictors: Sequence[Predictor | None],
    target: str,
    sha256: str,
) -> None:
    """Write what pi-convert puts into the model file's keys; written last, it completes the directory."""
    overall = measures.overall()
    values = {
        "sparse_threshold": 0.0,
        "source_sha256": sha256,
        "target": target,
        "recall": overall["recall"],
        "density": overall["predicted_density"],
        "perplexity_loss": overall["perplexity_loss"],
        "exact_layers": [predictor is None for predictor in predictors],
    }
    write_json(output / "config.json", values)


def manifest(
    settings: PredictorSettings, weights: Origin, statistics: ActivationStatistics
) -> Manifest:
    """Return what the predictors were made from and how."""
    origins = {
        "weights": weights,
        "activations": Origin("statistics", sha256=statistics.counts_sha256()),
    }
    for role, sources in (("text", settings.dataset_mixture), ("held_out", settings.eval_mixture)):
        for number, source in enumerate(sources):
            origins[f"{role}_{number}"] = Origin(source.id or Path(source.path).name)
    kept = {
        name: value if isinstance(value, (str, int, float, bool)) else json.dumps(value)
        for name, value in to_mapping(settings).items()
        if name not in ("dataset_mixture", "eval_mixture", "token_dir")  # no local path
    }
    return Manifest(KIND, origins, kept)


def write_json(path: Path, value: Any) -> None:  # noqa: ANN401 - plain values
    """Write a JSON file."""
    with new_file(path, force=True) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
