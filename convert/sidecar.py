"""Files beside the model: the full activation counts, and upstream's activation/ directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from powerinfer_toolkit.convert.activations import (
    COUNTS,
    PERMUTATION,
    UNION_DENSITY,
    Statistics,
    read_statistics,
)
from powerinfer_toolkit.convert.config import ModelConfig
from powerinfer_toolkit.convert.elements import Entry
from powerinfer_toolkit.convert.layer_files import find_layer_files
from powerinfer_toolkit.convert.safetensors_file import SafetensorsFile
from powerinfer_toolkit.convert.torch_file import require_torch
from powerinfer_toolkit.errors import PiError

UPSTREAM_DIRECTORY = "activation"


def sidecar_path(output: Path) -> Path:
    """Return model.activations.safetensors for model.gguf."""
    stem = output.name.removesuffix(".gguf")
    return output.with_name(f"{stem}.activations.safetensors")


def read_sidecar(path: Path, config: ModelConfig) -> tuple[Statistics, NDArray[np.int32]]:
    """Return the counts and the permutation of a model file's sidecar, both [n_layers, n_ff]. Raises PiError."""
    statistics = read_statistics(path, config, None)
    file = SafetensorsFile(path)
    shape = (config.n_layers, config.n_ff)
    entry = file.entries.get(PERMUTATION)
    if entry is None or entry != Entry("I32", shape):
        raise PiError(f"{path} holds no permutation {list(shape)}", hint="get the file again")
    permutation = file.read(PERMUTATION).data
    if (np.sort(permutation, axis=1) != np.arange(config.n_ff)).any():
        raise PiError(f"{path}: its permutation is none", hint="get the file again")
    return statistics, permutation.astype(np.int32)


def write_sidecar(
    path: Path, statistics: Statistics, permutation: NDArray[np.int32], manifest: str
) -> None:
    """Write counts [n_layers, n_ff] in the checkpoint's order and the permutation [n_layers, n_ff].

    permutation[l, j] is the checkpoint's neuron at place j of layer l in the model file; `manifest` is JSON.
    """
    metadata = {"manifest": manifest, "sha256": statistics.sha256}
    if statistics.tokens is not None:
        metadata["tokens"] = str(statistics.tokens)
    arrays = {COUNTS: statistics.counts, PERMUTATION: permutation}
    if statistics.union_density is not None:
        arrays[UNION_DENSITY] = statistics.union_density
    path.write_bytes(save(arrays, metadata))  # save_file would make it unreadable for others


def upstream_paths(output: Path, n_layers: int) -> list[Path]:
    """Return activation/activation_<layer>.pt beside the model; a file of a further layer is a PiError."""
    directory = output.parent / UPSTREAM_DIRECTORY
    if directory.is_dir():
        further = [
            layer for layer in find_layer_files(directory, "activation") if layer >= n_layers
        ]
        if further:
            raise PiError(
                f"{directory} holds activation_{further[0]} of another model",
                hint="upstream reads the whole directory: remove it, or write the output elsewhere",
            )
    return [directory / f"activation_{layer}.pt" for layer in range(n_layers)]


def write_upstream_layer(path: Path, counts_in_file_order: NDArray[np.int64]) -> None:
    """Write the counts [n_ff] of one layer as upstream's solver reads them: one torch tensor."""
    torch = require_torch("--upstream-sidecar")
    torch.save(torch.from_numpy(np.ascontiguousarray(counts_in_file_order)), path)
