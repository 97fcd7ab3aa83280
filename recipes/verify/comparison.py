"""The comparison itself: a model file in the runtime against its checkpoint in transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.fingerprint import weights_sha256
from powerinfer_toolkit.hub import LocalModel, locate
from powerinfer_toolkit.recipes.verify.checks import Check
from powerinfer_toolkit.recipes.verify.distance import Distance, Loss
from powerinfer_toolkit.recipes.verify.file_weights import (
    FileWeights,
    PredictorMatrices,
    trained_predictors,
)
from powerinfer_toolkit.recipes.verify.limits import (
    PREDICTED_PERPLEXITY,
    SWAP_DEVIATIONS,
    Limits,
    perplexity_limit,
)
from powerinfer_toolkit.recipes.verify.settings import VerifySettings
from powerinfer_toolkit.recipes.verify.texts import Window, read_windows
from powerinfer_toolkit.recipes.verify.torch_side import TorchSide, check_device
from powerinfer_toolkit.runtime import perplexity
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.plan import FfnMode
from powerinfer_toolkit.runtime.plan.planner import PlanOptions, available_modes
from powerinfer_toolkit.training.blocks import text_encoder
from powerinfer_toolkit.training.checkpoint import load_tokenizer

STEPS = 32  # tokens that are computed one by one


def compare(checkpoint: str | Path, path: Path, settings: VerifySettings) -> dict[str, Any]:
    """Do what verify() promises."""
    check_device(settings.device)
    local, weights = locate(str(checkpoint)), FileWeights(path)
    weights.check_shapes(local.path)
    source = _checked_source(weights, local, settings)
    trained = _trained(weights, settings)
    tokenizer = load_tokenizer(local)
    windows = read_windows(settings, text_encoder(tokenizer, settings.separator_token))
    _check_lengths(windows, weights.config.n_ctx)
    mode = FfnMode.EXACT if weights.is_sparse else FfnMode.DENSE
    with (
        _open(path, settings, windows, mode) as ours,
        _open_predicted(path, settings, windows) as predicted,
        _torch_threads(settings.threads),  # a number that the engine has not refused
    ):
        theirs = TorchSide(str(checkpoint), weights.is_sparse, settings)
        comparison = Comparison(ours, theirs, windows, _limits(ours, weights, settings))
        comparison.of_tokens(tokenizer)
        comparison.with_checkpoint(settings.max_kl)
        if trained is not None:
            comparison.of_masks("predicted_checkpoint", trained)
        comparison.of_weights(weights)
        comparison.with_file_weights()
        comparison.with_steps()
        matrices = weights.predictors()
        if predicted is not None and matrices is not None:
            comparison.of_masks("predicted_torch", matrices)
            comparison.of_predicted(predicted)
    names = {"file": path.name, "checkpoint": local.name, "revision": local.revision}
    return names | {"source": source, "types": dict(weights.elements())} | comparison.to_record()


class Comparison:
    """`ours`, a file in the runtime, against `theirs`, transformers, on some windows of tokens.

    What is found is kept for to_record(). The order of the calls matters: of_weights() gives transformers the
    file's weights.
    """

    def __init__(
        self, ours: Model, theirs: TorchSide, windows: list[Window], limits: Limits
    ) -> None:
        self._ours, self._theirs, self._windows, self._limits = ours, theirs, windows, limits
        self._mode = ours.plan.ffn_mode.name.lower()
        self._n_predicted = sum(len(window) - 1 for window in windows)
        self._checks: list[Check] = []
        self._perplexity: dict[str, float] = {}
        self._logits: dict[str, dict[str, float]] = {}
        self._weight_errors: dict[str, float] = {}
        self._same_weights = False

    def of_tokens(self, tokenizer: Any) -> None:  # noqa: ANN401 - transformers' own
        """Compare the file's tokenizer with the checkpoint's on the text of the windows."""
        n_wrong = 0
        for window in self._windows:
            text = tokenizer.decode(window)
            wanted = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            n_wrong += wanted != self._ours.tokenizer.encode(text, add_special=False)
        self._checks.append(Check("windows that the file tokenises differently", n_wrong, 0))

    def with_checkpoint(self, max_kl: float | None) -> None:
        """Compare logits and perplexity with the checkpoint's own weights."""
        self._distance = self._measure("checkpoint")
        limit = self._limits.quantisation_kl if max_kl is None else max_kl
        self._checks.append(Check("KL from the checkpoint", self._distance.kl, limit))

    def of_weights(self, weights: FileWeights) -> None:
        """Compare the weights themselves, and let transformers go on with those of the file."""
        self._weight_errors, self._same_weights = self._theirs.take_weights(weights)
        for dtype, error in sorted(self._weight_errors.items()):
            limit = self._limits.weights[dtype]
            self._checks.append(Check(f"weights in {dtype}, relative L2", error, limit))

    def with_file_weights(self) -> None:
        """Compare what remains when both compute with the same weights."""
        distance, limits = self._with_same_weights(), self._limits
        ratio = self._perplexity[self._mode] / self._perplexity["file_weights"]
        allowed = perplexity_limit(limits.kl, self._n_predicted)
        self._checks += [
            Check("logits, relative L2", distance.relative_l2, limits.logits),
            Check("KL", distance.kl, limits.kl),
            Check("likeliest tokens swapped beyond this error", distance.swaps, 0),
            Check(f"perplexity, {self._mode}, relative", abs(ratio - 1), allowed),
        ]

    def with_steps(self) -> None:
        """Compare the logits of single steps, as decoding takes them, with the file's weights."""
        tokens = self._windows[0][:STEPS]
        user = self._ours.start_text(tokens[:1].tolist())
        rows = [self._ours.engine.logits()]
        for token in tokens[1:].tolist():
            self._ours.continue_text(user, token)
            rows.append(self._ours.engine.logits())
        self._ours.forget()
        distance = Distance(self._limits.logits, SWAP_DEVIATIONS)
        want = self._theirs.logits(tokens)
        distance.add(torch.from_numpy(np.concatenate(rows)).to(want.device), want)
        self._logits["steps"] = distance.to_record()
        name = f"logits of {len(tokens)} single steps, relative L2"
        self._checks.append(Check(name, distance.relative_l2, self._limits.logits))

    def _with_same_weights(self) -> Distance:
        """Measure again, unless the file's weights are the checkpoint's to the bit."""
        if not self._same_weights:
            return self._measure("file_weights")
        self._perplexity["file_weights"] = self._perplexity["checkpoint"]
        self._logits["file_weights"] = self._logits["checkpoint"]
        return self._distance

    def of_masks(self, name: str, matrices: PredictorMatrices) -> None:
        """Measure the perplexity of transformers under the masks of predictors."""
        loss = Loss()
        with self._theirs.masked(matrices, self._ours.config.sink_positions):
            for window in self._shown(name.replace("_", ", ")):
                loss.add(self._theirs.logits(window), window)
        self._perplexity[name] = loss.perplexity(name)

    def of_predicted(self, predicted: Model) -> None:
        """Compare the perplexity of predicted mode with that of the masks in transformers."""
        windows = [window.tolist() for window in self._shown("predicted")]
        value = perplexity.measure(predicted, windows).value
        self._perplexity["predicted"] = value
        ratio = value / self._perplexity["predicted_torch"]
        name = "perplexity, predicted, relative to the masks in transformers"
        self._checks.append(Check(name, abs(ratio - 1), PREDICTED_PERPLEXITY))
        if (trained := self._perplexity.get("predicted_checkpoint")) is not None:
            name = "perplexity, predicted, relative to the trained predictors'"
            coarse = perplexity_limit(self._limits.quantisation_kl, self._n_predicted)
            limit = PREDICTED_PERPLEXITY + coarse
            self._checks.append(Check(name, abs(value / trained - 1), limit))

    def to_record(self) -> dict[str, Any]:
        """Return what was found as plain values."""
        plan = self._ours.plan
        return {
            "tokens": self._n_predicted,
            "windows": len(self._windows),
            "ffn_mode": self._mode,
            "activation_type": plan.activation_type.name.lower(),
            "kv_type": plan.kv_type.name.lower(),
            "logits": self._logits,
            "perplexity": self._perplexity,
            "weight_errors": self._weight_errors,
            "checks": [check.to_record() for check in self._checks],
            "passed": all(check.passed for check in self._checks),
        }

    def _measure(self, name: str) -> Distance:
        """Compare logits window by window, and keep the perplexities of both sides."""
        distance, ours, theirs = Distance(self._limits.logits, SWAP_DEVIATIONS), Loss(), Loss()
        for window in self._shown(name.replace("_", " ")):
            want = self._theirs.logits(window)
            got = torch.from_numpy(self._ours.logits(window)).to(want.device)
            distance.add(got, want)
            ours.add(got, window)
            theirs.add(want, window)
        self._perplexity[name] = theirs.perplexity(name)
        self._perplexity[self._mode] = ours.perplexity(self._mode)
        self._logits[name] = distance.to_record()
        return distance

    def _shown(self, label: str) -> Iterator[Window]:
        return console.progress(self._windows, total=len(self._windows), label=label, unit="window")


def _checked_source(
    weights: FileWeights, local: LocalModel, settings: VerifySettings
) -> dict[str, Any]:
    """Return the hash of the weights that the file records, and whether they are the checkpoint's.

    "matches" is None where one of the two is not known. Raises PiError for other weights.
    """
    recorded, own = weights.checkpoint_sha256(), weights_sha256(local.path)
    matches = recorded == own if recorded and own else None
    if matches is False and settings.check_source:
        raise PiError(
            f"the file was made from weights {recorded[:16]}, {local.name} has {own[:16]}",
            hint="name the checkpoint that it was made from; --check_source false compares all the same",
        )
    return {"sha256": recorded, "matches": matches}


def _check_lengths(windows: list[Window], n_ctx: int) -> None:
    longest = max(map(len, windows))
    if longest > n_ctx:
        raise UsageError(
            f"windows of {longest} tokens are above the {n_ctx} that the model was trained for",
            hint=f"--max_length {n_ctx}",
        )


def _trained(weights: FileWeights, settings: VerifySettings) -> PredictorMatrices | None:
    if settings.predictors is None:
        return None
    if weights.predictors() is None:
        raise UsageError(
            "the file has no predictors to compare with those of predictors",
            hint="leave --predictors out, or give it to pi-convert",
        )
    return trained_predictors(Path(settings.predictors), weights.config)


def _limits(ours: Model, weights: FileWeights, settings: VerifySettings) -> Limits:
    return Limits.of(ours.config, ours.plan, weights.elements(), settings.torch_dtype)


def _open(path: Path, settings: VerifySettings, windows: list[Window], mode: FfnMode) -> Model:
    longest = max(map(len, windows))
    options = PlanOptions(
        threads=settings.threads,
        context=longest,
        batch=longest,
        ffn=mode.name.lower(),
        activation_type=settings.activation_type,
    )
    return Model.open(path, options)


@contextlib.contextmanager
def _open_predicted(
    path: Path, settings: VerifySettings, windows: list[Window]
) -> Iterator[Model | None]:
    """Yield the file in predicted mode, None where it has no trained predictors."""
    with ModelFile(path) as file:
        predictable = FfnMode.PREDICTED in available_modes(file.shape)
    if not predictable:
        yield None
        return
    with _open(path, settings, windows, FfnMode.PREDICTED) as model:
        yield model


@contextlib.contextmanager
def _torch_threads(n_threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
