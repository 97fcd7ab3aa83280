"""Training group by group of layers, each kept on disk when it is done, so that a run resumes after the last."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from powerinfer_toolkit import console
from powerinfer_toolkit.artifact import new_file
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.train_predictor.calibration import Curves, measure_curves
from powerinfer_toolkit.train_predictor.texts import Texts
from powerinfer_toolkit.train_predictor.training import Context, train_group, whitening_of

STATE_DIRECTORY = ".resume"
_CURVES = ("thresholds", "missed", "read")


@dataclass(frozen=True)
class TrainedLayers:
    """Some layers by rank: `fc1` [n_layers, rank, n_embd], `fc2` [n_layers, n_ff, rank], float32, threshold 0
    on the input of rms 1; their curves; how constant the constant unit is; the losses by step."""

    fc1: dict[int, Tensor]
    fc2: dict[int, Tensor]
    curves: dict[int, Curves]
    constant_error: Tensor
    losses: list[list[Any]]


def group_layers(n_layers: int, per_group: int | None) -> list[list[int]]:
    """Return consecutive layers in groups of at most `per_group`."""
    step = per_group or n_layers
    return [list(range(n_layers))[begin : begin + step] for begin in range(0, n_layers, step)]


def train_all(context: Context, texts: Texts, output: Path, identity: str) -> TrainedLayers:
    """Train all groups of layers that `output` does not hold yet; return all layers."""
    groups = group_layers(context.model.n_layers, context.settings.layers_per_group)
    done = []
    for layers in groups:
        path = output / STATE_DIRECTORY / f"layers_{layers[0]}_{layers[-1]}.safetensors"
        if path.is_file():
            console.info(f"layers {layers[0]}-{layers[-1]} are trained already")
            done.append(_load(path, identity, context))
            continue
        done.append(_train(context, texts, layers))
        if context.accelerator.is_main_process:
            path.parent.mkdir(exist_ok=True)
            _save(path, done[-1], identity)
        context.accelerator.wait_for_everyone()
    return _join(done)


def _train(context: Context, texts: Texts, layers: Sequence[int]) -> TrainedLayers:
    context.reseed(layers[0])
    n_moment = max(1, context.settings.moment_tokens // context.settings.max_length)
    stride = max(1, len(texts.train) // n_moment)
    whitening = whitening_of(context, texts.train[::stride], layers)
    trained = train_group(context, texts.train, layers, whitening)
    curves = measure_curves(context, texts.calibration, layers, trained.stacks)
    with torch.no_grad():
        return TrainedLayers(
            {stack.rank: stack.fc1().cpu() for stack in trained.stacks},
            {stack.rank: stack.second.detach().cpu() for stack in trained.stacks},
            {stack.rank: found for stack, found in zip(trained.stacks, curves, strict=True)},
            whitening.constant_error.cpu(),
            [[list(layers), trained.losses]],
        )


def _save(path: Path, trained: TrainedLayers, identity: str) -> None:
    tensors = {"constant_error": trained.constant_error}
    for rank, curves in trained.curves.items():
        tensors |= {f"{rank}.fc1": trained.fc1[rank], f"{rank}.fc2": trained.fc2[rank]}
        tensors |= {f"{rank}.{name}": getattr(curves, name) for name in _CURVES}
    metadata = {"identity": identity, "losses": json.dumps(trained.losses)}
    with new_file(path, force=True) as temporary:
        temporary.write_bytes(save({n: t.contiguous() for n, t in tensors.items()}, metadata))


def _load(path: Path, identity: str, context: Context) -> TrainedLayers:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    if metadata["identity"] != identity:
        raise PiError(
            f"{path.parent} belongs to a run with other settings, weights or texts",
            hint="repeat that run's settings to continue it, or remove the directory",
        )
    ranks = context.settings.predictor_rank
    return TrainedLayers(
        {rank: tensors[f"{rank}.fc1"] for rank in ranks},
        {rank: tensors[f"{rank}.fc2"] for rank in ranks},
        {rank: Curves(*(tensors[f"{rank}.{name}"] for name in _CURVES)) for rank in ranks},
        tensors["constant_error"],
        json.loads(metadata["losses"]),
    )


def _join(parts: list[TrainedLayers]) -> TrainedLayers:
    ranks = list(parts[0].fc1)
    curves = {
        rank: Curves(
            *(torch.cat([getattr(part.curves[rank], name) for part in parts]) for name in _CURVES)
        )
        for rank in ranks
    }
    return TrainedLayers(
        {rank: torch.cat([part.fc1[rank] for part in parts]) for rank in ranks},
        {rank: torch.cat([part.fc2[rank] for part in parts]) for rank in ranks},
        curves,
        torch.cat([part.constant_error for part in parts]),
        [entry for part in parts for entry in part.losses],
    )
