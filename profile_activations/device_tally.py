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

    @torch.inference_mode()
    def observe(self, tokens: Tensor, counted: Tensor) -> None:
        """Run tokens [n_sequences, n_positions] and add what fires where counted (bool, same shape)."""
        everything = bool(counted[:, 1:].all())
        kept = counted[:, 1:].to(self._model.device)  # position 0 never counts
        self._sums["tokens"] += kept.sum()
        self._sums["windows"] += torch.stack(window_counts(kept))

        def tap(layer: int, _: Tensor, hidden: Tensor) -> None:
            sums = layer_sums(hidden[:, 1:] != 0, None if everything else kept)
            self._sums["counts"][layer] += sums.counts
            self._sums["both"][layer] += sums.both
            self._sums["either"][layer] += sums.either
            self._sums["unions"][layer] += torch.stack(sums.unions)

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


def _to_tally(sums: dict[str, Tensor]) -> Tally:
    return Tally(*(np.array(sums[field.name].cpu().numpy()) for field in fields(Tally)))
