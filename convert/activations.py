"""Activation counts: how often each FFN neuron was non-zero, from upstream's layout or in one file.

DIR/activation_<layer>.pt (one 1-D tensor) or .safetensors (one tensor), [n_ff] each; or one .npy or .safetensors
file with all layers, [n_layers, n_ff] (in safetensors: tensor "counts", metadata "tokens"; pi-profile's and pi-run's
have "union_density" [n_layers, 6] besides). DIR/statistics.safetensors stands for DIR.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.artifact import Manifest
from powerinfer_toolkit.convert.config import ModelConfig
from powerinfer_toolkit.convert.elements import Array, RawTensor, to_float32
from powerinfer_toolkit.convert.layer_files import check_layers, find_layer_files
from powerinfer_toolkit.convert.roles import WEIGHTS
from powerinfer_toolkit.convert.safetensors_file import SafetensorsFile
from powerinfer_toolkit.convert.torch_file import load, require_torch, to_raw
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import UNION_WINDOWS
from powerinfer_toolkit.statistics import FILE_NAME, KIND, coverage_curves

COUNTS, PERMUTATION, UNION_DENSITY = "counts", "permutation", "union_density"
_HINT = "counts say how often each neuron fired on some text: get those of this model"


@dataclass(frozen=True)
class Statistics:
    """Activation counts [n_layers, n_ff], int64 (float32 where they are no integers), in the model's order.

    `tokens` is how many tokens were seen, None where unknown; `sha256` the hash of the little-endian counts.
    `union_density` [n_layers, 6] float32 as statistics.py has it, None where unknown; `source_sha256` the hash of
    the weights that were profiled, "" where unknown.
    """

    name: str
    counts: Array
    tokens: int | None
    sha256: str
    union_density: Array | None = None
    source_sha256: str = ""

    def hot_first(self) -> NDArray[np.int32]:
        """Return the original neuron at every place of the falling order, [n_layers, n_ff]; ties keep theirs."""
        return np.argsort(-self.counts, axis=1, kind="stable").astype(np.int32)

    def coverage(self) -> NDArray[np.float32]:
        """Return the coverage curve of every layer, [n_layers, 129]."""
        return coverage_curves(self.counts)

    def density(self) -> NDArray[np.float32] | None:
        """Return the mean share of active neurons per token, [n_layers]; None where tokens are unknown."""
        if self.tokens is None:
            return None
        share: Array = self.counts.mean(axis=1, dtype=np.float64) / self.tokens
        return share.astype(np.float32)


class _Found(NamedTuple):
    counts: Array
    tokens: int | None = None
    union_density: Array | None = None
    source_sha256: str = ""


def read_statistics(path: Path, config: ModelConfig, tokens: int | None) -> Statistics:
    """Read the counts at `path`, a directory or a file; `tokens` overrides what the file says.

    Raises PiError for a missing or an extra layer, another shape, and counts that are negative, not finite,
    all zero in a layer, or above the number of tokens.
    """
    if not path.exists():
        raise PiError(f"{path} does not exist", hint="--activations takes a directory or a file")
    path = path / FILE_NAME if (path / FILE_NAME).is_file() else path
    if path.is_dir():
        found = _Found(_read_directory(path, config))
    elif path.suffix == ".npy":
        found = _Found(_read_npy(path))
    elif path.suffix == ".safetensors":
        found = _read_safetensors(path)
    else:
        raise PiError(
            f"{path} holds no activation counts",
            hint="name a directory of activation_<layer>.pt files, or a .npy or .safetensors file",
        )
    counts = _normalised(found.counts, path)
    tokens = found.tokens if tokens is None else tokens
    _check(counts, path, config, tokens)
    digest = hashlib.sha256(counts.astype(counts.dtype.newbyteorder("<")).tobytes()).hexdigest()
    return Statistics(
        path.resolve().name, counts, tokens, digest, found.union_density, found.source_sha256
    )


def _read_directory(directory: Path, config: ModelConfig) -> Array:
    files = find_layer_files(directory, "activation")
    layers = []
    for path in check_layers(files, directory, "activation", config.n_layers):
        counts = _read_layer(path)
        if counts.shape != (config.n_ff,):
            raise PiError(
                f"{path} has shape {list(counts.shape)}; this model needs [{config.n_ff}]",
                hint="are these counts of another model?",
            )
        layers.append(counts)
    return np.stack(layers)


def _read_layer(path: Path) -> Array:
    if path.suffix == ".safetensors":
        file = SafetensorsFile(path)
        if len(file.entries) != 1:
            raise PiError(f"{path} holds {len(file.entries)} tensors; it needs one", hint=_HINT)
        return _numbers(file.read(next(iter(file.entries))))
    torch = require_torch(f"reading {path.name}")
    tensor = load(path)
    if not isinstance(tensor, torch.Tensor):
        raise PiError(f"{path} holds no tensor", hint="upstream's files hold one 1-D tensor each")
    return _numbers(to_raw(tensor, str(path)))


def _read_npy(path: Path) -> Array:
    try:  # mapped, so that a header cannot claim more than the file holds
        counts = np.load(path, allow_pickle=False, mmap_mode="r")
    except OSError:
        raise
    except Exception as failure:  # numpy parses the header as Python and lets its errors through
        raise PiError(f"{path} is no numpy array file: {failure}", hint=_HINT) from failure
    if not isinstance(counts, np.ndarray) or counts.dtype.kind not in "iuf":
        raise PiError(f"{path} holds no array of numbers", hint=_HINT)
    return np.array(counts)


def _read_safetensors(path: Path) -> _Found:
    file = SafetensorsFile(path)
    if COUNTS not in file.entries:
        raise PiError(f'{path} has no tensor "{COUNTS}"', hint=_HINT)
    if file.metadata.get("neuron_order") == "file":
        raise PiError(
            f"{path} numbers neurons as in a hot-first model file, whose permutation was not at hand",
            hint="record again with the model's .activations.safetensors beside it",
        )
    tokens = file.metadata.get("tokens")
    if tokens is not None and not (str(tokens).isdecimal() and int(tokens) > 0):
        raise PiError(
            f"{path}: metadata tokens is {tokens!r:.40}, not a positive integer", hint=_HINT
        )
    return _Found(
        _numbers(file.read(COUNTS)),
        None if tokens is None else int(tokens),
        _union_density(file),
        _profiled_weights(file, path),
    )


def _union_density(file: SafetensorsFile) -> Array | None:
    """Return it where it is there, and known for every window."""
    entry = file.entries.get(UNION_DENSITY)
    if entry is None or entry.dtype != "F32" or entry.shape[1:] != (len(UNION_WINDOWS),):
        return None
    density = file.read(UNION_DENSITY).data
    return density if np.isfinite(density).all() else None


def _profiled_weights(file: SafetensorsFile, path: Path) -> str:
    """Return the hash of the weights that pi-profile or pi-run names."""
    if "manifest" not in file.metadata:
        return ""
    manifest = Manifest.from_json(file.metadata["manifest"], where=path)  # refuses a later schema
    weights = manifest.origins.get(WEIGHTS)
    return weights.sha256 if manifest.kind == KIND and weights is not None else ""


def _numbers(raw: RawTensor) -> Array:
    return to_float32(raw.data, raw.dtype) if raw.dtype == "BF16" else raw.data


def _normalised(counts: Array, path: Path) -> Array:
    """Return int64 where every count is an integer that float64 holds exactly, else float32."""
    if counts.dtype.kind == "f":
        counts = counts.astype(np.float64)
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise PiError(f"{path} holds counts that are negative, NaN or infinite", hint=_HINT)
    if (counts == np.floor(counts)).all() and counts.max(initial=0) < 2**53:
        return counts.astype(np.int64)
    return counts.astype(np.float32)


def _check(counts: Array, path: Path, config: ModelConfig, tokens: int | None) -> None:
    if counts.shape != (config.n_layers, config.n_ff):
        raise PiError(
            f"{path} has shape {list(counts.shape)}; this model needs "
            f"[{config.n_layers}, {config.n_ff}]",
            hint="are these counts of another model?",
        )
    silent = np.flatnonzero(counts.sum(axis=1) == 0)
    if silent.size:
        raise PiError(f"{path}: no neuron of layer {silent[0]} was ever active", hint=_HINT)
    if tokens is not None and counts.max() > tokens:
        raise PiError(
            f"{path}: a count of {counts.max()} is above the {tokens} tokens seen",
            hint="--activation-tokens takes the number of tokens that the counts were taken over",
        )
