"""Does a model file compute what its checkpoint computes? pi-verify, and the last stage of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from powerinfer_toolkit.recipes.verify.settings import VerifySettings

__all__ = ["VerifySettings", "check_device", "verify"]


def check_device(name: str | None) -> None:
    """Refuse a device for the checkpoint that is not here or does not compute. Raises UsageError."""
    from powerinfer_toolkit.recipes.verify import torch_side  # needs torch

    torch_side.check_device(name)


def verify(checkpoint: str | Path, path: Path, settings: VerifySettings) -> dict[str, Any]:
    """Compare the model file `path` with `checkpoint`, a directory or `id[@revision]`; return plain values.

    "passed" says whether every one of "checks" holds. "perplexity" has the checkpoint's, the file's ("exact" or
    "dense"), transformers' with the file's weights ("file_weights") and, where the file has predictors,
    "predicted" and "predicted_torch", the same masks in transformers on the file's weights; with
    settings.predictors also "predicted_checkpoint", those on the checkpoint's own. Raises PiError for a file of
    another model, and for what cannot be read.
    """
    from powerinfer_toolkit.recipes.verify.comparison import compare  # needs torch

    return compare(checkpoint, path, settings)
