"""Activation statistics of one's own traffic, as pi-profile counts them, from the engine's record of what fired."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from powerinfer_toolkit import console
from powerinfer_toolkit.artifact import Manifest, Origin, check_target
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.gguf_format import UNION_WINDOWS, Activation, Key, NeuronOrder
from powerinfer_toolkit.runtime.plan.plan import FfnMode
from powerinfer_toolkit.statistics import EXCLUDED, KIND, ActivationStatistics, Tally, layer_sums

if TYPE_CHECKING:
    from powerinfer_toolkit.runtime.model import Model

Fired = npt.NDArray[np.bool_]
_BLOCK = UNION_WINDOWS[-1]  # tokens that are summed at a time: the largest window


class ActivationRecorder:
    """Adds up what fires at the tokens of one sequence after another, in file order.

    Positions that do not follow each other begin a new run of tokens; no window spans two runs.
    """

    def __init__(self, n_layers: int, n_ff: int, bos_id: int | None) -> None:
        self._tally = Tally.zeros(n_layers, n_ff)
        self._bos = -1 if bos_id is None else bos_id
        self._fired = np.zeros((_BLOCK, n_layers, n_ff), np.bool_)
        self._counted = np.zeros(_BLOCK, np.bool_)
        self._next = 0  # position that would continue the run
        self._previous: Fired | None = (
            None  # [n_layers, n_ff] of the last token of the block before
        )

    def observe(self, position: int, tokens: Sequence[int], fired: Fired) -> None:
        """Take in consecutive tokens from `position` on; fired is [n_tokens, n_layers, n_ff]."""
        if position != self._next:
            self._sum_block()
            self._previous = None
        for token, row in zip(tokens, fired, strict=True):
            if position > 0:
                self._put((position - 1) % _BLOCK, token, row)
            position += 1
        self._next = position

    def _put(self, place: int, token: int, row: Fired) -> None:
        self._fired[place] = row
        self._counted[place] = token != self._bos
        if place == _BLOCK - 1:
            last = row.copy() if self._counted[place] else None
            self._sum_block()
            self._previous = last

    def _sum_block(self) -> None:
        """Add the block to the tally and empty it."""
        if not self._counted.any():
            return
        pair = np.array([[True, self._counted[0]]])
        for layer in range(self._fired.shape[1]):
            fired = self._fired[None, :, layer]
            self._tally.add_layer(layer, layer_sums(fired, self._counted[None]))
            if self._previous is not None:
                sums = layer_sums(np.stack([self._previous[layer], fired[0, 0]])[None], pair)
                self._tally.both[layer] += sums.both
                self._tally.either[layer] += sums.either
        self._tally.add_tokens(self._counted[None])
        self._fired[:] = False
        self._counted[:] = False

    def tally(self) -> Tally:
        """Return the sums over everything observed, and end the run."""
        self._sum_block()
        self._previous, self._next = None, 0
        return deepcopy(self._tally)


@contextmanager
def recording(model: Model, path: Path | None) -> Iterator[None]:
    """Record what the model does meanwhile into `path`, where there is one; Ctrl-C keeps what was counted.

    Raises PiError and UsageError before anything runs where the file could not be written.
    """
    if path is None:
        yield
        return
    check_target(path, force=True)
    recorder = model.record_activations()
    try:
        yield
    except KeyboardInterrupt:
        with suppress(PiError):
            save_recorded(recorder, model, path)
        raise
    save_recorded(recorder, model, path)


def check_recordable(model: Model) -> None:
    """Raise UsageError where the engine does not compute every neuron, or none is ever off."""
    if model.config.activation is not Activation.RELU:
        raise UsageError(
            "--record-activations needs a ReLU model: other activations are never 0",
            hint="make one with pi-relufy",
        )
    if model.plan.ffn_mode is FfnMode.PREDICTED:
        raise UsageError(
            "--record-activations counts what fires, and predicted mode drops some of it",
            hint="use it with --ffn exact or --ffn dense",
        )


def save_recorded(recorder: ActivationRecorder, model: Model, path: Path) -> None:
    """Write the statistics in the checkpoint's neuron order, added to those that `path` holds of this model.

    Where a hot-first file lies without its sidecar, neurons are numbered as in the file, and `path` says so.
    Raises PiError where nothing was counted, and for a `path` of another model.
    """
    tally = recorder.tally()
    if not tally.tokens[0]:
        raise PiError("no token was counted", hint=f"not counted are {EXCLUDED}")
    order = _permutation(model)
    in_file_order = order is None
    if order is not None:
        counts = np.empty_like(tally.counts)
        np.put_along_axis(counts, order, tally.counts, axis=1)
        tally.counts = counts
    statistics = ActivationStatistics(tally, _manifest(model), in_file_order)
    if path.exists():
        held = ActivationStatistics.load(path)
        _check_same(held, statistics, path)
        tally.add(held.tally)
    statistics.save(path)
    console.info(f"{statistics.n_tokens} tokens in {path}")


def _permutation(model: Model) -> npt.NDArray[np.int64] | None:
    """Return the checkpoint's neuron at every place of the file [n_layers, n_ff]; None where it is not known."""
    shape = model.config.n_layers, model.config.n_ff
    if model.metadata(Key.NEURON_ORDER) != NeuronOrder.HOT_FIRST:
        return np.tile(np.arange(shape[1]), (shape[0], 1))
    path = Path(model.file.path)
    path = path.with_name(f"{path.name.removesuffix('.gguf')}.activations.safetensors")
    try:
        with safe_open(path, "np") as file:
            belongs = file.metadata().get("sha256") == model.metadata(Key.STATISTICS_SHA256)
            order: npt.NDArray[np.int64] = file.get_tensor("permutation").astype(np.int64)
    except (OSError, SafetensorError):
        belongs = False
    if belongs and order.shape == shape:
        return order
    console.warning(f"{path} is missing or another model's: neurons are numbered as in the file")
    return None


def _manifest(model: Model) -> Manifest:
    name, revision, sha256 = (
        model.metadata(key) or ""
        for key in (Key.SOURCE_NAME, Key.SOURCE_REVISION, Key.SOURCE_SHA256)
    )
    settings: dict[str, str | int | float | bool] = {"recorded_by": "pi-run", "excluded": EXCLUDED}
    return Manifest(KIND, {"weights": Origin(name, revision, sha256)}, settings)


def _check_same(held: ActivationStatistics, new: ActivationStatistics, path: Path) -> None:
    same = (
        held.tally.counts.shape == new.tally.counts.shape
        and held.in_file_order == new.in_file_order
        and held.manifest.origins.get("weights") == new.manifest.origins["weights"]
    )
    if not same:
        raise PiError(f"{path} holds statistics of another model", hint="name another file")
