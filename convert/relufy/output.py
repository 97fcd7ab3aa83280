"""The output directory: settings first, the run's state beside them, the checkpoint and its manifest last."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from powerinfer_toolkit import artifact, console, hub
from powerinfer_toolkit.artifact import Manifest, Origin
from powerinfer_toolkit.convert.relufy import checkpoints
from powerinfer_toolkit.convert.relufy.settings import FREE_KEYS, RelufySettings
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.settings import differing_keys, to_mapping, to_yaml

SETTINGS, RESULTS, MANIFEST = "relufy.yaml", "relufy_results.json", "manifest.json"


class Output:
    """`folder` becomes a Hugging Face checkpoint with relufy.yaml, relufy_results.json and manifest.json."""

    def __init__(self, settings: RelufySettings) -> None:
        self.settings = settings
        self.folder = Path(settings.output_dir)
        self.checkpoints = self.folder / "checkpoints"

    @property
    def is_finished(self) -> bool:
        """Whether the checkpoint is there, whole."""
        return (self.folder / MANIFEST).exists()

    def open(self, *, restart: bool) -> None:
        """Make or reopen the directory.

        Raises UsageError where the directory holds something else, or a run with other settings.
        """
        path = self.folder / SETTINGS
        if path.exists() and restart:
            self._empty()
        if path.exists():
            self._compare(path)
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise UsageError(
                f"{self.folder} is not empty and holds no run of pi-relufy",
                hint="name a new directory as output_dir",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        with artifact.new_file(path, force=True) as temporary:
            temporary.write_text(to_yaml(self.settings), encoding="utf-8")
        checkpoints.remove_broken(self.checkpoints)

    def _empty(self) -> None:
        """Remove what lies in the directory; itself it may be locked."""
        for entry in self.folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _compare(self, path: Path) -> None:
        try:
            old = yaml.safe_load(path.read_text(encoding="utf-8"))
            changed = differing_keys(old, to_mapping(self.settings))
        except (yaml.YAMLError, AttributeError) as failure:
            raise PiError(f"{path} is damaged", hint="--restart begins anew") from failure
        changed = [key for key in changed if key not in FREE_KEYS]
        if changed:
            raise UsageError(
                f"{self.folder} was begun with other settings: {', '.join(changed)}",
                hint=f"use those of {path}, another output_dir, or --restart to begin anew",
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """Yield a directory whose files move into `folder` when all are written."""
        temporary = self.folder / ".checkpoint.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        with artifact.writing(self.folder):
            yield temporary
        for path in sorted(temporary.iterdir()):
            os.replace(path, self.folder / path.name)
        temporary.rmdir()

    def finish(self, source: hub.LocalModel, results: dict[str, Any]) -> None:
        """Write results and manifest, and remove the training state."""
        with artifact.new_file(self.folder / RESULTS, force=True) as path:
            path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        with artifact.new_file(self.folder / MANIFEST, force=True) as path:
            path.write_text(self._manifest(source).to_json() + "\n", encoding="utf-8")
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        for name, found in results.items():
            zeros = f", zeros {found['zero_share']:.2%}" if found["zero_share_by_layer"] else ""
            console.info(f"{name}: held-out perplexity {found['perplexity']:.3f}{zeros}")

    def _manifest(self, source: hub.LocalModel) -> Manifest:
        digest = hashlib.sha256()
        for path in sorted(source.path.glob("*.safetensors")):
            with path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        settings = self.settings
        scalars = {
            key: value
            for key, value in to_mapping(settings).items()
            if isinstance(value, (str, int, float)) and key not in FREE_KEYS
        }
        scalars |= {"model_name_or_path": source.name}
        if settings.teacher_model_name_or_path:
            scalars["teacher_model_name_or_path"] = Path(settings.teacher_model_name_or_path).name
        for key in ("dataset_mixture", "eval_mixture"):
            names = [source.id or Path(source.path).name for source in getattr(settings, key)]
            scalars[key] = ", ".join(names)
        origin = Origin(source.name, source.revision, digest.hexdigest())
        return Manifest("checkpoint", {"model": origin}, scalars)
