"""Activation predictors: one two-layer network a layer, logit = fc2 relu(fc1 x), in upstream's layout.

DIR/model_<layer>.pt or .safetensors with fc1.weight [rank, n_embd] and fc2.weight [n_ff, rank]; the rank may
differ between layers. DIR/config.json may give sparse_threshold: a neuron is active iff logit >= it.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

from powerinfer_toolkit.convert.config import ModelConfig
from powerinfer_toolkit.convert.elements import WEIGHT_DTYPES, RawTensor, TensorFile
from powerinfer_toolkit.convert.layer_files import (
    check_layers,
    find_layer_files,
    open_tensor_file,
)
from powerinfer_toolkit.errors import PiError

FC1, FC2 = "fc1.weight", "fc2.weight"


class Predictors:
    """The predictors of every layer, checked against the model; weights are read one at a time.

    `ranks` has one rank a layer. Raises PiError for a missing, an extra or a misshapen file.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        if not directory.is_dir():
            raise PiError(f"{directory} is not a directory", hint="--predictors takes a directory")
        self.name = directory.resolve().name
        paths = check_layers(
            find_layer_files(directory, "model"), directory, "model", config.n_layers
        )
        self._files = [open_tensor_file(path) for path in paths]
        self._digests: dict[str, str] = {}
        self.ranks = [
            _checked_rank(file, path, config) for file, path in zip(self._files, paths, strict=True)
        ]
        self.sparse_threshold = _read_threshold(directory / "config.json")

    def read(self, layer: int, name: str) -> RawTensor:
        """Return FC1 or FC2 of a layer; its bytes enter sha256()."""
        raw = self._files[layer].read(name)
        self._digests[f"{layer:05}.{name}"] = hashlib.sha256(raw.data.data).hexdigest()
        return raw

    def sha256(self) -> str:
        """Return the hash of everything read so far, independent of the files' kind."""
        lines = (f"{name} {digest}\n" for name, digest in sorted(self._digests.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def _checked_rank(file: TensorFile, path: Path, config: ModelConfig) -> int:
    for name in (FC1, FC2):
        if name not in file.entries:
            raise PiError(f"{path} lacks {name}", hint=f"it needs {FC1} and {FC2}")
        if file.entries[name].dtype not in WEIGHT_DTYPES:
            raise PiError(f"{path}: {name} has the unsupported type {file.entries[name].dtype}")
    if extra := sorted(set(file.entries) - {FC1, FC2}):
        raise PiError(
            f"{path} holds {extra[0]}", hint="predictors have no biases and no other layers"
        )
    fc1, fc2 = file.entries[FC1].shape, file.entries[FC2].shape
    rank = fc1[0] if fc1 else 0
    if rank == 0 or fc1 != (rank, config.n_embd) or fc2 != (config.n_ff, rank):
        raise PiError(
            f"{path}: {FC1} is {list(fc1)} and {FC2} is {list(fc2)}; this model needs "
            f"[rank, {config.n_embd}] and [{config.n_ff}, rank]",
            hint="are these predictors of another model?",
        )
    return rank


def _read_threshold(path: Path) -> float:
    if not path.is_file():
        return 0.0
    try:
        threshold = json.loads(path.read_bytes()).get("sparse_threshold", 0.0)
    except (ValueError, AttributeError) as failure:
        raise PiError(f"{path} is not a JSON object") from failure
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not is_number or not math.isfinite(threshold):
        raise PiError(f"{path}: sparse_threshold is {threshold!r}, not a finite number")
    return float(threshold)
