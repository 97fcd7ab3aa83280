"""Checkpoints that count only when they are whole, so that a run killed at any moment can go on."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from powerinfer_toolkit import artifact

# Written last: a checkpoint without it was cut short.
SEAL = "relufy_state.json"
KEPT = 2
NAME = re.compile(r"checkpoint-(\d+)")


def seal(checkpoint: Path, state: dict[str, Any]) -> None:
    """Declare a checkpoint whole, with what transformers' Trainer does not keep; drop older ones."""
    with artifact.new_file(checkpoint / SEAL, force=True) as path:
        path.write_text(json.dumps(state) + "\n", encoding="utf-8")
    for older in whole_checkpoints(checkpoint.parent)[:-KEPT]:
        shutil.rmtree(older)


def read_seal(checkpoint: Path) -> dict[str, Any]:
    """Return the state that `seal` was given."""
    state: dict[str, Any] = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))
    return state


def whole_checkpoints(folder: Path) -> list[Path]:
    """Return the sealed checkpoints in `folder`, oldest first."""
    found = [path.parent for path in folder.glob(f"checkpoint-*/{SEAL}")]
    return sorted((path for path in found if NAME.fullmatch(path.name)), key=_step)


def remove_broken(folder: Path) -> None:
    """Remove checkpoints that were cut short."""
    whole = set(whole_checkpoints(folder))
    for path in folder.glob("checkpoint-*"):
        if NAME.fullmatch(path.name) and path not in whole:
            shutil.rmtree(path)


def _step(path: Path) -> int:
    return int(path.name.rsplit("-", 1)[1])
