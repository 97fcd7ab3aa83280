"""What a run has done so far: a record for every stage, of what it is made from and of what it wrote."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from powerinfer_toolkit.artifact import Manifest, new_file
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.settings import differing_keys

FOLDER = "stages"


@dataclass(frozen=True)
class Record:
    """What one stage is made from, and the hash of every file that it wrote, None until it is finished."""

    manifest: Manifest
    outputs: dict[str, str] | None = None

    def fingerprint(self) -> str:
        """Return a hash of the outputs, which the stages after are made from."""
        return hashlib.sha256(json.dumps(self.outputs, sort_keys=True).encode()).hexdigest()


class Progress:
    """The records in OUT/stages."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self._folder = output_dir / FOLDER

    def open(self) -> None:
        """Make or reopen the run's directory. Raises UsageError where it holds something else."""
        here = self.output_dir
        if here.is_dir() and any(here.iterdir()) and not self._folder.is_dir():
            raise UsageError(
                f"{here} is not empty and holds no run of pi-recipe",
                hint="name a new directory as --output_dir",
            )
        self._folder.mkdir(parents=True, exist_ok=True)

    def load(self, stage: str) -> Record | None:
        """Return a stage's record, None where it never began. Raises PiError where it is damaged."""
        path = self._path(stage)
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            manifest = Manifest.from_json(json.dumps(content["manifest"]), where=path)
            outputs = content["outputs"]
            return Record(manifest, None if outputs is None else dict(outputs))
        except (ValueError, KeyError, TypeError) as failure:
            raise PiError(f"{path} is damaged", hint=f"--restart {stage}") from failure

    def is_finished(self, stage: str) -> bool:
        """Return whether a stage's record says so."""
        record = self.load(stage)
        return record is not None and record.outputs is not None

    def begin(self, stage: str, manifest: Manifest) -> None:
        """Record that a stage begins; leave the record of one that goes on, or is finished and unchanged.

        Raises UsageError for other settings or inputs than before, and for outputs that were changed since.
        """
        record = self.load(stage)
        if record is None:
            self._save(stage, Record(manifest))
            return
        changed = _changes(record.manifest, manifest)
        if changed:
            raise UsageError(
                f"{stage} in {self.output_dir} was begun with other {', '.join(changed)}",
                hint=f"--restart {stage} makes it anew with all that follows; or name another --output_dir",
            )
        self._check_outputs(stage, record.outputs or {})

    def finish(self, stage: str, files: Iterable[Path]) -> None:
        """Record that a stage is finished, and what it wrote."""
        record = self.load(stage)
        assert record is not None
        outputs = {str(path.relative_to(self.output_dir)): _sha256(path) for path in files}
        self._save(stage, Record(record.manifest, outputs))

    def forget(self, stages: Sequence[str], folders: Iterable[Path]) -> None:
        """Delete records and outputs of stages."""
        for stage in reversed(stages):  # never a record of a stage whose inputs are gone
            self._path(stage).unlink(missing_ok=True)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _check_outputs(self, stage: str, outputs: dict[str, str]) -> None:
        for name, sha256 in outputs.items():
            path = self.output_dir / name
            if not path.is_file() or _sha256(path) != sha256:
                what = "was changed" if path.is_file() else "is missing"
                raise UsageError(
                    f"{path} {what} since {stage} wrote it",
                    hint=f"--restart {stage} makes it anew with all that follows",
                )

    def _save(self, stage: str, record: Record) -> None:
        content = {"manifest": asdict(record.manifest), "outputs": record.outputs}
        with new_file(self._path(stage), force=True) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _path(self, stage: str) -> Path:
        return self._folder / f"{stage}.json"


def _changes(old: Manifest, new: Manifest) -> list[str]:
    """Return what two manifests differ in: origins by role, settings by key."""
    origins = [
        {role: asdict(origin) for role, origin in made.origins.items()} for made in (old, new)
    ]
    return [*differing_keys(*origins), *differing_keys(old.settings, new.settings)]


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
