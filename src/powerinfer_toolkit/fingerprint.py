"""The hash that names a checkpoint's weights, powerinfer.source.sha256 in docs/format.md section 3."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from powerinfer_toolkit.arch import ARCHITECTURES
from powerinfer_toolkit.errors import PiError

_CHUNK_BYTES = 1 << 24
_HEAD = "lm_head.weight"


def weights_sha256(directory: Path) -> str:
    """Return the hash of the weights that a model file is made of; "" where they are not in safetensors.

    Raises PiError for a file that is damaged.
    """
    lines = [line for path in _weight_files(directory) for line in _lines(path, _used(directory))]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest() if lines else ""


def _weight_files(directory: Path) -> list[Path]:
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    names = json.loads(index.read_bytes())["weight_map"].values()
    return [directory / name for name in sorted(set(names))]


def _used(directory: Path) -> re.Pattern[str]:
    """Return the pattern of the parameter names that enter: those of the architecture table."""
    config = json.loads((directory / "config.json").read_bytes())
    tied = bool(config.get("tie_word_embeddings"))
    templates = [
        name for arch in ARCHITECTURES for name in arch.tensors if not tied or name != _HEAD
    ]
    return re.compile("|".join(re.escape(name).replace(r"\{i\}", r"\d+") for name in templates))


def _lines(path: Path, used: re.Pattern[str]) -> Iterator[str]:
    """Yield one line for each tensor of a safetensors file: name, type, shape and the hash of its bytes."""
    with path.open("rb") as stream:
        try:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                if used.fullmatch(name):
                    begin, end = entry["data_offsets"]
                    stream.seek(8 + length + begin)
                    shape = "x".join(map(str, entry["shape"]))
                    yield f"{name} {entry['dtype']} {shape} {_digest(stream, end - begin)}\n"
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as failure:
            raise PiError(f"{path} is damaged: {failure}", hint="get the file again") from failure


def _digest(stream: Any, n_bytes: int) -> str:  # noqa: ANN401 - a binary file
    digest = hashlib.sha256()
    while n_bytes > 0:
        chunk = stream.read(min(n_bytes, _CHUNK_BYTES))
        if not chunk:
            raise ValueError("cut short")
        digest.update(chunk)
        n_bytes -= len(chunk)
    return digest.hexdigest()
