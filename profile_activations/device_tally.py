"""The tally of spine's statistics.py kept on the device: nothing waits for the device while texts stream."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from powerinfer_toolkit.statistics import Tally, layer_sums, window_counts
from powerinfer_toolkit.training.checkpoint import SparseModel


class DeviceTally:
    """Integer sums [int64] on the model's device; memory does not depend on the number of tokens."""

    def __init__(self, model: SparseModel) -> None:
        empty = Tally.zeros(model.n_layers, model.n_ff)
        self._sums = {
            name: torch.from_numpy(array).to(model.device) for name, array in empty.arrays().items()
        }
        self._model = model
        # Compiled, seven sums read the activations once each and write nothing in between.
        self._sums_of = torch.compile(_sums_of) if model.device.type == "cuda" else _sums_of

    @torch.inference_mode()
    def observe(self, tokens: Tensor, counted: Tensor) -> None:
        """Run tokens [n_sequences, n_positions] and add what fires where counted (bool, same shape)."""
        everything = bool(counted[:, 1:].all())
        kept = counted[:, 1:].to(self._model.device)  # position 0 never counts
        self._sums["tokens"] += kept.sum()
        self._sums["windows"] += torch.stack(window_counts(kept))

        def tap(layer: int, _: Tensor, hidden: Tensor) -> None:
            found = self._sums_of(hidden, None if everything else kept)
            for name, sums in zip(("counts", "both", "either", "unions"), found, strict=True):
                self._sums[name][layer] += sums

        with self._model.tapped(tap):
            self._model.hidden_states(tokens.to(self._model.device))

    def load(self, tally: Tally) -> None:
        """Take over the sums of an interrupted run."""
        for name, array in tally.arrays().items():
            self._sums[name].copy_(torch.from_numpy(array))

    def tally(self) -> Tally:
        """Return this process's sums."""
        return _to_tally(self._sums)

    def merged(self, accelerator: Accelerator) -> Tally:
        """Return the sums of all processes; every process has to call it."""
        return _to_tally({name: accelerator.reduce(a, "sum") for name, a in self._sums.items()})


def _sums_of(hidden: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return layer_sums() of hidden [n_sequences, 1 + n_positions, n_ff], position 0 left out."""
    sums = layer_sums(hidden[:, 1:] != 0, kept)
    return sums.counts, sums.both, sums.either, torch.stack(sums.unions)


def _to_tally(sums: dict[str, Tensor]) -> Tally:
    return Tally(*(np.array(sums[field.name].cpu().numpy()) for field in fields(Tally)))
