"""The checkpoint in transformers: its own weights, then the file's, and the masks of predictors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.recipes.verify.file_weights import FileWeights, PredictorMatrices, Values
from powerinfer_toolkit.recipes.verify.settings import VerifySettings
from powerinfer_toolkit.train_predictor.masking import masked
from powerinfer_toolkit.train_predictor.network import Predictor
from powerinfer_toolkit.training.checkpoint import (
    SparseModel,
    load_dense_model,
    load_sparse_model,
)
from powerinfer_toolkit.training.precision import float32_products

_HEAD = "lm_head.weight"


def chosen_device(name: str | None) -> str:
    """The device that is named, else a GPU where there is one."""
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def check_device(name: str | None) -> None:
    """Refuse a device that is not here or does not compute. Raises UsageError."""
    chosen = chosen_device(name)
    try:
        torch.ones(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as failure:
        raise UsageError(
            f"torch cannot compute on device {chosen!r} here",
            hint=f"cpu works anywhere; CUDA devices that torch sees: {torch.cuda.device_count()}",
        ) from failure


class TorchSide:
    """The model as transformers computes it, ReLU-sparse or dense."""

    def __init__(self, checkpoint: str, sparse: bool, settings: VerifySettings) -> None:
        """Load it. Raises PiError."""
        self._device = torch.device(chosen_device(settings.device))
        how: dict[str, Any] = {
            "device": self._device,
            "dtype": settings.torch_dtype,
            "trust_remote_code": settings.trust_remote_code,
        }
        self._sparse: SparseModel | None = None
        if sparse:
            self._sparse = load_sparse_model(checkpoint, **how)
            self._model = self._sparse.model
        else:
            self._model = load_dense_model(checkpoint, **how)

    @torch.inference_mode()
    def logits(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """Return float32 [n_tokens, n_vocab] of one sequence, where the model is."""
        ids = torch.from_numpy(tokens[None]).to(self._device)
        with float32_products("ieee"):
            found: torch.Tensor = self._model(ids, use_cache=False).logits[0].float()
        return found

    @contextlib.contextmanager
    def masked(self, matrices: PredictorMatrices, sink_positions: int) -> Iterator[None]:
        """Apply predictors as pi-train-predictor does, to every position but the sinks."""
        if self._sparse is None:
            raise TypeError("masks are for ReLU-sparse models")
        predictors = [
            None
            if found is None
            else Predictor(self._tensor(found[0]), self._tensor(found[1]), matrices.threshold)
            for found in matrices.layers
        ]
        with masked(self._sparse, predictors, None, sink_positions):
            yield

    def _tensor(self, values: Values) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)

    def take_weights(self, weights: FileWeights) -> tuple[dict[str, float], bool]:
        """Replace every parameter by the file's; return the worst relative error by type, and if all are equal.

        Tensors whose neurons are in an order that is not known are not compared.
        """
        errors: dict[str, float] = {}
        same = True
        for name, dtype, values, comparable in weights.parameters():
            own = self._model.get_parameter(name)
            new = torch.from_numpy(values)
            error = 0.0
            if comparable:
                rows = slice(min(len(own), len(new)))
                error = _relative_error(new[rows], own[rows].float().cpu())
                errors[dtype] = max(errors.get(dtype, 0.0), error)
            same = same and comparable and error == 0.0
            self._put(name, new.to(own.device, own.dtype))
        return errors, same

    def _put(self, name: str, values: torch.Tensor) -> None:
        """Set a parameter in place, but for a head, which may be tied in the checkpoint and not in the file."""
        if name == _HEAD:
            self._model.lm_head.weight = nn.Parameter(values, requires_grad=False)
            return
        with torch.no_grad():
            own = self._model.get_parameter(name)
            rows = min(len(own), len(values))
            own[:rows] = values[:rows]


def _relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp(min=1e-30))
