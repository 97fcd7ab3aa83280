"""Activation predictors: one two-layer network a layer, logit = fc2 relu(fc1 x), in upstream's layout.

DIR/model_<layer>.pt or .safetensors with fc1.weight [rank, n_embd] and fc2.weight [n_ff, rank]; the rank may
differ between layers. DIR/config.json may give sparse_threshold (a neuron is active iff logit >= it) and
source_sha256, the hash of the weights that the predictors were trained for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from powerinfer_toolkit.artifact import Origin
from powerinfer_toolkit.convert.config import ModelConfig
from powerinfer_toolkit.convert.elements import WEIGHT_DTYPES, Entry, RawTensor, TensorFile
from powerinfer_toolkit.convert.hashing import TensorHash
from powerinfer_toolkit.convert.layer_files import (
    check_layers,
    find_layer_files,
    open_tensor_file,
)
from powerinfer_toolkit.convert.roles import PREDICTORS, placeholder
from powerinfer_toolkit.errors import PiError

FC1, FC2 = "fc1.weight", "fc2.weight"
_MAX_THRESHOLD = 3e38  # the key is a float32


class Predictors:
    """The predictors of every layer, checked against the model; weights are read one at a time.

    `ranks` has one rank a layer, `source_sha256` what config.json says of the weights they belong to. Raises
    PiError for a missing, an extra or a misshapen file.
    """

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        if not directory.is_dir():
            raise PiError(f"{directory} is not a directory", hint="--predictors takes a directory")
        name = directory.resolve().name
        self.origins = {PREDICTORS: Origin(name, sha256=placeholder(PREDICTORS))}
        paths = check_layers(
            find_layer_files(directory, "model"), directory, "model", config.n_layers
        )
        self._files = [open_tensor_file(path) for path in paths]
        self._hash = TensorHash()
        self.ranks = [
            _checked_rank(file, path, config) for file, path in zip(self._files, paths, strict=True)
        ]
        settings = _read_settings(directory / "config.json")
        self.sparse_threshold = _threshold(settings, directory)
        self.source_sha256 = str(settings.get("source_sha256") or "")

    def entry(self, layer: int, name: str) -> Entry:
        """Return type and shape of FC1 or FC2 of a layer."""
        return self._files[layer].entries[name]

    def read(self, layer: int, name: str) -> RawTensor:
        """Return FC1 or FC2 of a layer; its bytes enter hashes()."""
        raw = self._files[layer].read(name)
        self._hash.add(f"{layer:05}.{name}", self.entry(layer, name), raw)
        return raw

    def hashes(self) -> dict[str, str]:
        """Return the hash of everything read so far, independent of the files' kind."""
        return {PREDICTORS: self._hash.hexdigest()}


def _checked_rank(file: TensorFile, path: Path, config: ModelConfig) -> int:
    for name in (FC1, FC2):
        if name not in file.entries:
            raise PiError(f"{path} lacks {name}", hint=f"it needs {FC1} and {FC2}")
        if file.entries[name].dtype not in WEIGHT_DTYPES:
            raise PiError(
                f"{path}: {name} has the unsupported type {file.entries[name].dtype}",
                hint=f"supported: {', '.join(WEIGHT_DTYPES)}",
            )
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


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as failure:
        raise PiError(f"{path} is not JSON", hint="correct it, or remove it") from failure
    if not isinstance(settings, dict):
        raise PiError(f"{path} is not a JSON object", hint="correct it, or remove it")
    return settings


def _threshold(settings: dict[str, Any], directory: Path) -> float:
    threshold = settings.get("sparse_threshold", 0.0)
    is_number = isinstance(threshold, (int, float)) and not isinstance(threshold, bool)
    if not (is_number and abs(threshold) < _MAX_THRESHOLD):
        raise PiError(
            f"{directory / 'config.json'}: sparse_threshold is {threshold!r:.40}, not a finite number",
            hint="a neuron is active where its logit is at least this",
        )
    return float(threshold)
