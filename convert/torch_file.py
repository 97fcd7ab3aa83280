"""Read torch's zip files of tensors, one tensor at a time; needs torch, which the `train` extra brings.

Only tensors are unpickled (weights_only), from a memory map that ends with the tensor it was opened for.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from powerinfer_toolkit.convert.elements import Entry, RawTensor
from powerinfer_toolkit.errors import PiError

if TYPE_CHECKING:
    import torch

_NAMES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
}


def require_torch(purpose: str) -> ModuleType:
    """Return the torch module; where it is missing, a PiError says what to install."""
    try:
        import torch
    except ImportError as failure:
        raise PiError(
            f"{purpose} needs torch",
            hint="pip install 'powerinfer-toolkit[train]', or use safetensors files",
        ) from failure
    return torch


def load(path: Path) -> object:
    """Return what torch.save wrote to `path`, its tensors memory-mapped. Raises PiError."""
    torch = require_torch(f"reading {path.name}")
    try:
        loaded: object = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as failure:
        raise PiError(
            f"{path} is damaged or holds more than tensors, and was not loaded",
            hint="save it again as a plain dictionary of tensors, or as safetensors",
        ) from failure
    except (OSError, MemoryError):
        raise
    except Exception as failure:  # of any kind, by what is wrong in the file
        raise PiError(
            f"{path} cannot be read: {(str(failure) or repr(failure)).splitlines()[0]}",
            hint="get the file again; files of torch before 1.6 must be saved again by a newer one",
        ) from failure
    return loaded


def to_raw(tensor: torch.Tensor, where: str) -> RawTensor:
    """Return a tensor's elements without a copy where it is contiguous."""
    import torch

    name = _NAMES.get(str(tensor.dtype))
    if name is None or tensor.layout != torch.strided:
        raise PiError(
            f"{where} has the unsupported type {tensor.dtype}",
            hint=f"supported: {', '.join(_NAMES.values())}, dense",
        )
    tensor = tensor.detach().contiguous()
    if name == "BF16":
        return RawTensor(name, tensor.view(torch.int16).numpy().view(np.uint16))
    return RawTensor(name, tensor.numpy())


class TorchFile:
    """One file of torch.save that holds a dictionary of tensors: `entries` of them all, and read()."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries = {
            name: Entry(_NAMES.get(str(tensor.dtype), str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in self._tensors().items()
        }

    def _tensors(self) -> dict[str, torch.Tensor]:
        torch = require_torch(f"reading {self._path.name}")
        tensors = load(self._path)
        if not isinstance(tensors, dict):
            raise PiError(
                f"{self._path} holds no dictionary of tensors",
                hint="save it again as a plain dictionary of tensors, or as safetensors",
            )
        return {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}

    def read(self, name: str) -> RawTensor:
        """Return one tensor in its own type; the file stays mapped while it is in use."""
        return to_raw(self._tensors()[name], f"{name} of {self._path}")
