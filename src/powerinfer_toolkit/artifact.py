"""What artefacts on disk share: a manifest of their making, and writes that leave nothing half done."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from powerinfer_toolkit import __version__
from powerinfer_toolkit.errors import PiError

MANIFEST_SCHEMA = 1
# How safetensors and tokenizers (Rust), and torch.save, say in exceptions of their own that a write failed.
DISK_FAILURES = ("(os error ", "PytorchStreamWriter", "inline_container")


@dataclass(frozen=True)
class Origin:
    """One thing that an artefact was made from; `revision` and `sha256` are "" where unknown."""

    name: str
    revision: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Manifest:
    """What an artefact is (`kind`), what it was made from (role -> origin) and by which settings.

    `history` has made_by and settings of every earlier step, oldest first, where an artefact was made from
    one of its own kind. It holds no clock time and no local path, so that the same inputs give the same bytes.
    """

    kind: str
    origins: dict[str, Origin]
    settings: dict[str, str | int | float | bool]
    made_by: str = field(default=f"powerinfer-toolkit {__version__}")
    schema: int = MANIFEST_SCHEMA
    history: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        """Return one line of JSON with sorted keys; an empty history is left out."""
        content = asdict(self)
        if not self.history:
            del content["history"]
        return json.dumps(content, sort_keys=True)

    def with_history(self) -> list[dict[str, Any]]:
        """Return the history of an artefact that is made from this one."""
        return [*self.history, {"made_by": self.made_by, "settings": self.settings}]

    @classmethod
    def from_json(cls, text: str, *, where: Path) -> Manifest:
        """Parse a manifest found in `where`; a schema that this version does not know is a PiError."""
        try:
            data = json.loads(text)
            schema = data.pop("schema")
            if schema != MANIFEST_SCHEMA:
                raise PiError(
                    f"{where} has manifest schema {schema}; this version knows {MANIFEST_SCHEMA}",
                    hint="make it again with the commands of this version",
                )
            data["origins"] = {role: Origin(**origin) for role, origin in data["origins"].items()}
            if not isinstance(data.get("history", []), list):
                raise TypeError("history is no list")
            return cls(schema=schema, **data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
            raise PiError(
                f"{where} has a damaged manifest: {failure}", hint="make it again, or get it again"
            ) from failure


def check_target(path: Path, *, force: bool) -> None:
    """Refuse a path that cannot be written: no such directory, or it exists and `force` is not set."""
    if not path.parent.is_dir():
        raise PiError(
            f"{path.parent} is not a directory", hint="create it, or write the output elsewhere"
        )
    if path.is_dir():
        raise PiError(f"{path} is a directory", hint="name a file in it")
    if path.exists() and not force:
        raise PiError(f"{path} exists already", hint="--force overwrites it")


@contextlib.contextmanager
def only_run(directory: Path) -> Iterator[None]:
    """Make `directory` and refuse a second run in it meanwhile (PiError), on disks that have locks.

    The lock is the directory's own and ends with the process, however that ends. Of a launch with several processes
    the first one holds it.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # where there are no locks
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as failure:
                raise PiError(
                    f"another run is at work in {directory}",
                    hint="wait for its end, or name another directory",
                ) from failure
        yield
    finally:
        os.close(number)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what libraries raise where `path` cannot be written, a full disk for example, into PiError."""
    try:
        yield
    except (OSError, PiError):
        raise
    except Exception as failure:
        why = str(failure)
        if not any(sign in why for sign in DISK_FAILURES):
            raise
        raise PiError(
            f"cannot write {path}: {why.splitlines()[0]}",
            hint="check the path, its permissions and the free space on its disk",
        ) from failure


@contextlib.contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary name beside `path`; its file is flushed to disk and takes `path`'s place at the end.

    On any failure, Ctrl-C included, the temporary file is removed and `path` stays as it was.
    """
    check_target(path, force=force)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Make `path` a directory, unless it is one, and remove it again if nothing came to lie in it."""
    path.mkdir(exist_ok=True)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()


def check_space(path: Path, needed_bytes: int) -> None:
    """Refuse an output that the disk has no room for."""
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < needed_bytes:
        raise PiError(
            f"the output needs {needed_bytes / 1e9:.2f} GB and {path.parent} has {free_bytes / 1e9:.2f} GB free",
            hint="free some space, write elsewhere or take a smaller --outtype",
        )
