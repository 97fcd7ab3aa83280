"""Activation predictors: one two-layer network a layer, logit = fc2 relu(fc1 x), in upstream's layout.

DIR/model_<layer>.pt or .safetensors with fc1.weight [rank, n_embd] and fc2.weight [n_ff, rank]; the rank may
differ between layers. DIR/config.json may give sparse_threshold (a neuron is active iff logit >= it), source_sha256 (the hash of the
weights that the predictors were trained for), exact_layers (true for each layer that predicted mode computes
exactly; its predictor is all zero), and what was measured: target, recall, density, perplexity_loss.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFValueType as ValueType

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
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.tokenizer_keys import MetadataEntry

FC1, FC2 = "fc1.weight", "fc2.weight"
_MEASURED = {
    "recall": Key.PREDICTOR_RECALL,
    "density": Key.PREDICTOR_DENSITY,
    "perplexity_loss": Key.PREDICTOR_PERPLEXITY_LOSS,
}
_FLOAT32_MAX = 3e38


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
        self.sparse_threshold = _number(settings, "sparse_threshold", directory) or 0.0
        self.exact_layers = _exact_layers(settings, directory, config.n_layers)
        self.measured = _measured(settings, directory, self.exact_layers)
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


def _number(settings: dict[str, Any], name: str, directory: Path) -> float | None:
    number = settings.get(name)
    if number is None:
        return None
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not (is_number and abs(number) < _FLOAT32_MAX):
        raise PiError(
            f"{directory / 'config.json'}: {name} is {number!r:.40}, not a finite number",
            hint="correct it, or remove it",
        )
    return float(number)


def _exact_layers(settings: dict[str, Any], directory: Path, n_layers: int) -> list[bool]:
    flags = settings.get("exact_layers")
    if flags is None:
        return [False] * n_layers
    if not (isinstance(flags, list) and len(flags) == n_layers) or set(map(type, flags)) != {bool}:
        raise PiError(
            f"{directory / 'config.json'}: exact_layers is not {n_layers} times true or false",
            hint="are these predictors of another model?",
        )
    return flags


def _measured(
    settings: dict[str, Any], directory: Path, exact_layers: list[bool]
) -> list[MetadataEntry]:
    """Return the keys of what config.json says of the predictors."""
    entries = []
    if any(exact_layers):
        key = Key.PREDICTOR_EXACT_LAYERS
        entries.append(MetadataEntry(key, ValueType.ARRAY, exact_layers, ValueType.BOOL))
    if isinstance(settings.get("target"), str):
        entries.append(MetadataEntry(Key.PREDICTOR_TARGET, ValueType.STRING, settings["target"]))
    for name, key in _MEASURED.items():
        number = _number(settings, name, directory)
        if number is not None:
            entries.append(MetadataEntry(key, ValueType.FLOAT32, number))
    return entries
