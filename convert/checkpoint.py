"""A Hugging Face checkpoint directory: where each tensor lies, read one at a time, hashed on the way."""

from __future__ import annotations

import json
from pathlib import Path

from powerinfer_toolkit.convert.elements import Entry, RawTensor, TensorFile
from powerinfer_toolkit.convert.hashing import TensorHash
from powerinfer_toolkit.convert.layer_files import open_tensor_file
from powerinfer_toolkit.errors import PiError

_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


class Checkpoint:
    """The weights of a checkpoint directory, single or sharded, safetensors or torch.

    `entries` maps parameter names to type and shape; only headers are read until read() is called.
    """

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, TensorFile] = {}
        self.entries: dict[str, Entry] = {}
        self._hash = TensorHash()
        for path, names in _shards(directory).items():
            self._add_shard(path, names)

    def _add_shard(self, path: Path, names: list[str] | None) -> None:
        """Take the tensors `names` of a shard, or all of them."""
        file = open_tensor_file(path)
        for name in file.entries if names is None else names:
            if name not in file.entries:
                raise PiError(
                    f"{path} lacks {name}, which the index puts there", hint="get the file again"
                )
            self._files[name] = file
            self.entries[name] = file.entries[name]

    def read(self, name: str) -> RawTensor:
        """Return one tensor; its bytes enter sha256()."""
        raw = self._files[name].read(name)
        self._hash.add(name, self.entries[name], raw)
        return raw

    def sha256(self) -> str:
        """Return the hash of all tensors read so far; the same for every way to store the checkpoint."""
        return self._hash.hexdigest()


def _shards(directory: Path) -> dict[Path, list[str] | None]:
    """Return the weight files of a checkpoint with the tensors to take from each (None: all)."""
    for single in _SINGLE_FILES:
        index = directory / f"{single}.index.json"
        if (directory / single).is_file():
            return {directory / single: None}
        if index.is_file():
            return _read_index(index)
    raise PiError(
        f"{directory} holds no weights",
        hint="expected model.safetensors, pytorch_model.bin or either with .index.json and its shards",
    )


def _read_index(index: Path) -> dict[Path, list[str] | None]:
    try:
        weight_map = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        raise PiError(
            f"{index} is no index of weight files", hint="get the file again"
        ) from failure
    shards: dict[Path, list[str]] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise PiError(
                f"{index} puts {name} outside its own directory", hint="get the file again"
            )
        shards.setdefault(index.parent / file_name, []).append(name)
    missing = sorted(path.name for path in shards if not path.is_file())
    if missing:
        raise PiError(
            f"{index.parent} lacks {', '.join(missing)}", hint="get the missing weight files"
        )
    return dict(shards)
