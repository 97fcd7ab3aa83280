"""Directories with one file per layer, as upstream lays out predictors and activation counts."""

from __future__ import annotations

import re
from pathlib import Path

from powerinfer_toolkit.convert.elements import TensorFile
from powerinfer_toolkit.convert.safetensors_file import SafetensorsFile
from powerinfer_toolkit.convert.torch_file import TorchFile
from powerinfer_toolkit.errors import PiError


def find_layer_files(directory: Path, stem: str) -> dict[int, Path]:
    """Return layer -> `stem`_<layer>.safetensors, or .pt where there is no such safetensors file at all."""
    by_suffix: dict[str, dict[int, Path]] = {".safetensors": {}, ".pt": {}}
    for path in sorted(directory.iterdir()):
        match = re.fullmatch(rf"{stem}_(\d+)", path.stem)
        if match and path.suffix in by_suffix:
            files = by_suffix[path.suffix]
            layer = int(match[1])
            if layer in files:
                raise PiError(
                    f"{files[layer]} and {path} are both for layer {layer}", hint="remove one"
                )
            files[layer] = path
    return by_suffix[".safetensors"] or by_suffix[".pt"]


def check_layers(files: dict[int, Path], directory: Path, stem: str, n_layers: int) -> list[Path]:
    """Return the files by layer; a missing or an extra one is a PiError."""
    missing = sorted(set(range(n_layers)) - set(files))
    extra = sorted(set(files) - set(range(n_layers)))
    if missing:
        raise PiError(
            f"{directory} lacks {stem}_{missing[0]} ({len(missing)} of {n_layers} layers are missing)",
            hint=f"the model has {n_layers} layers; one file {stem}_<layer>.pt or .safetensors each",
        )
    if extra:
        raise PiError(
            f"{files[extra[0]]} belongs to no layer: the model has {n_layers}",
            hint="are these files of another model?",
        )
    return [files[layer] for layer in range(n_layers)]


def open_tensor_file(path: Path) -> TensorFile:
    """Open a dictionary of tensors by its suffix, .safetensors or torch's .pt."""
    return SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
