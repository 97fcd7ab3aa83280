"""Predictors of a ReLU-sparse model, from texts to files: train, calibrate, measure, export."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from powerinfer_toolkit import console
from powerinfer_toolkit.artifact import Origin
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.settings import to_mapping
from powerinfer_toolkit.statistics import ActivationStatistics
from powerinfer_toolkit.train_predictor import output as files
from powerinfer_toolkit.train_predictor.evaluation import Measures, evaluate, to_record
from powerinfer_toolkit.train_predictor.groups import STATE_DIRECTORY, train_all
from powerinfer_toolkit.train_predictor.masking import mean_loss
from powerinfer_toolkit.train_predictor.selection import Selection, Selector, check_budget
from powerinfer_toolkit.train_predictor.settings import GRADIENT, PredictorSettings
from powerinfer_toolkit.train_predictor.texts import Texts, read_texts
from powerinfer_toolkit.train_predictor.training import Context
from powerinfer_toolkit.training.blocks import TokenStore, text_encoder
from powerinfer_toolkit.training.checkpoint import SparseModel, load_sparse_model, load_tokenizer


@dataclass(frozen=True)
class Result:
    """What was exported: each layer's rank (0: exact), and its measures on the test text."""

    ranks: list[int]
    measures: Measures


def train_predictors(
    source: str, statistics: ActivationStatistics, output: Path, settings: PredictorSettings
) -> Result:
    """Train predictors of the checkpoint `source` and write them into the directory `output`.

    The same call continues an interrupted one after the last whole group of layers. Raises PiError for
    statistics of another model, layers that never or always fire, too little text, and a loss that is NaN.
    """
    accelerator = Accelerator()
    output.mkdir(parents=True, exist_ok=True)
    model = load_sparse_model(
        source,
        device=accelerator.device,
        dtype=settings.torch_dtype,
        trust_remote_code=settings.trust_remote_code,
    )
    keep_gradients_in_range(model, settings)
    weights = model.origin()
    check_statistics(statistics, model, weights)
    check_budget(model, settings)
    encoder = text_encoder(load_tokenizer(model.source), settings.separator_token)
    store = TokenStore(settings, encoder, Path(settings.token_dir or output / "tokens"))
    with accelerator.main_process_first():
        store.make()
    texts = read_texts(settings, store)
    console.info(
        f"tokens: {texts.train.size:,} to train, {texts.calibration.size:,} to calibrate, "
        f"{texts.test.size:,} to test"
    )
    context = Context(model, accelerator, settings, statistics.frequency())
    start = time.perf_counter()
    trained = train_all(context, texts, output, _identity(settings, weights, texts, accelerator))
    train_seconds = time.perf_counter() - start
    console.info(f"trained in {train_seconds:.1f} s")
    selector = Selector(context, trained, texts.calibration)
    selections = [selector.select(allowed) for allowed in settings.target_perplexity_loss]
    unmasked = mean_loss(model, texts.test, settings.per_device_batch_size, accelerator)
    measures = [evaluate(context, s.predictors, texts.test, unmasked) for s in selections]
    for allowed, found in zip(settings.target_perplexity_loss, measures, strict=True):
        overall = found.overall()
        console.info(
            f"calibrated to {100 * allowed:+g}% perplexity: {overall['bytes']:.1%} of the FFN's bytes, "
            f"{overall['perplexity_loss']:+.2%} on the test text, recall {overall['recall']:.1%}"
        )
    report = {
        "settings": to_mapping(settings),
        "train_seconds": train_seconds,
        "peak_bytes": _peak_bytes(model),
        "constant_error": trained.constant_error.tolist(),
        "losses": trained.losses,
        "targets": [
            _record(*found)
            for found in zip(settings.target_perplexity_loss, selections, measures, strict=True)
        ],
    }
    if accelerator.is_main_process:
        origins = weights, statistics
        _write(output, model, settings, origins, selections[0], measures[0], report)
    accelerator.wait_for_everyone()
    return Result([choice.rank for choice in selections[0].choices], measures[0])


def keep_gradients_in_range(model: SparseModel, settings: PredictorSettings) -> None:
    """Turn a float16 model into bfloat16, or float32, where gradients are needed and no type was asked for.

    The few neurons that feed an attention sink take gradients beyond float16's range, at any one scale.
    """
    given = settings.torch_dtype != "auto" or settings.predictor_loss != GRADIENT
    if given or model.blocks[0].down.weight.dtype != torch.float16:
        return
    able = model.device.type != "cuda" or torch.cuda.is_bf16_supported()
    model.model.to(torch.bfloat16 if able else torch.float32)


def _peak_bytes(model: SparseModel) -> int | None:
    """Return the most GPU memory that was in use, None on a CPU."""
    on_gpu = model.device.type == "cuda"
    return torch.cuda.max_memory_allocated(model.device) if on_gpu else None


def check_statistics(statistics: ActivationStatistics, model: SparseModel, weights: Origin) -> None:
    """Raise PiError for statistics of another model, and for layers that leave nothing to predict."""
    counts = statistics.tally.counts
    found = statistics.manifest.origins.get("weights", Origin(""))
    other = found.sha256 and weights.sha256 and found.sha256 != weights.sha256
    if other or counts.shape != (model.n_layers, model.n_ff):
        raise PiError(
            f"the statistics are those of another model, {found.name} with {list(counts.shape)} neurons",
            hint=f"profile {weights.name} first: pi-profile MODEL OUT",
        )
    if statistics.in_file_order:
        raise PiError(
            "the statistics number neurons as in a hot-first model file",
            hint="record them beside the model's .activations.safetensors, or use pi-profile",
        )
    density = statistics.frequency().mean(axis=1)
    for what, layers in (("never", density == 0.0), ("always", density == 1.0)):
        if layers.any():
            raise PiError(
                f"layer {int(layers.argmax())} {what} fires: there is nothing to predict",
                hint="was the model made ReLU-sparse, and profiled on enough text?",
            )


def _identity(
    settings: PredictorSettings, weights: Origin, texts: Texts, accelerator: Accelerator
) -> str:
    """Return what has to agree between an interrupted run and the one that continues it."""
    later = (
        "target_perplexity_loss",
        "predictor_budget",
        "exact_layers",
        "upstream",
        "test_tokens",
    )
    values = {name: v for name, v in to_mapping(settings).items() if name not in later}
    tokens = [
        hashlib.sha256(blocks.tobytes()).hexdigest() for blocks in (texts.train, texts.calibration)
    ]
    values |= {"weights": weights.sha256, "tokens": tokens}
    return json.dumps(values | {"processes": accelerator.num_processes}, sort_keys=True)


def _record(allowed: float, selection: Selection, measures: Measures) -> dict[str, Any]:
    thresholds = [choice.threshold for choice in selection.choices]
    return {
        "allowed": allowed,
        "price": selection.price,
        "ranks": [choice.rank for choice in selection.choices],
        "thresholds": [t if np.isfinite(t) else None for t in thresholds],
        **to_record(measures),
    }


def _write(
    output: Path,
    model: SparseModel,
    settings: PredictorSettings,
    origins: tuple[Origin, ActivationStatistics],
    selection: Selection,
    measures: Measures,
    report: dict[str, Any],
) -> None:
    """Write the directory and forget what an interrupted run would have resumed from."""
    weights, statistics = origins
    predictors = selection.predictors
    if all(predictor is None for predictor in predictors):
        console.warning("no layer's predictor pays: all stay exact")
    files.write_predictors(output, predictors, model.n_embd, model.n_ff, upstream=settings.upstream)
    files.write_json(output / "report.json", report)
    manifest = files.manifest(settings, weights, statistics)
    files.write_json(output / "manifest.json", json.loads(manifest.to_json()))
    target = f"perplexity {settings.target_perplexity_loss[0]:+.1%}, cost {settings.predictor_loss}"
    files.write_config(output, measures, predictors, target, weights.sha256)
    shutil.rmtree(output / STATE_DIRECTORY, ignore_errors=True)
