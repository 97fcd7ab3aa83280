"""Where a model lies on this machine: a directory as given, or a snapshot from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError

TEXT_FILES = ("*.json", "*.jinja", "tokenizer.model")
SAFETENSORS_FILES = ("model*.safetensors",)
TORCH_FILES = ("pytorch_model*.bin",)


@dataclass(frozen=True)
class LocalModel:
    """A Hugging Face checkpoint in a local directory.

    `name` is the hub id, or the directory's own name; `revision` the commit, "" for a plain directory.
    """

    path: Path
    name: str
    revision: str = ""


def locate(source: str) -> LocalModel:
    """Return the checkpoint named by `source`, a directory or `id[@revision]` of the hub.

    An existing path wins over a hub id. The hub's own settings (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, ...)
    hold, its cache is used, and only configuration, tokenizer and weight files are fetched:
    safetensors, or pytorch_model*.bin where there are none. Raises PiError.
    """
    path = Path(source)
    if path.is_dir():
        return LocalModel(path, path.resolve().name)
    if path.exists():
        raise PiError(f"{source} is not a directory", hint="name the directory of the checkpoint")
    model_id, _, revision = source.partition("@")
    snapshot = _download(model_id, revision, (*TEXT_FILES, *SAFETENSORS_FILES))
    if not any(snapshot.glob(SAFETENSORS_FILES[0])):
        snapshot = _download(model_id, revision, (*TEXT_FILES, *TORCH_FILES))
    return LocalModel(snapshot, model_id, snapshot.name)


def _download(model_id: str, revision: str, patterns: Sequence[str]) -> Path:
    """Return the snapshot directory, whose name is the commit."""
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if console.verbosity() < console.NORMAL:
        disable_progress_bars()
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model_id, revision=revision or None, allow_patterns=list(patterns)
            )
        )
    except errors.HFValidationError as failure:
        raise PiError(
            f"{model_id} is neither a directory nor a hub id",
            hint="check the path, or write ORGANISATION/NAME or ORGANISATION/NAME@REVISION",
        ) from failure
    except (errors.EntryNotFoundError, errors.HfHubHTTPError, OSError) as failure:
        raise _explain(model_id, revision, failure) from failure


def _explain(model_id: str, revision: str, failure: Exception) -> PiError:
    from huggingface_hub import constants, errors

    if isinstance(failure, errors.GatedRepoError):
        return PiError(
            f"{model_id} is gated",
            hint="accept its terms on its page of the hub, then `hf auth login`",
        )
    if isinstance(failure, errors.RevisionNotFoundError):
        return PiError(f"{model_id} has no revision {revision}", hint="check branch, tag or commit")
    if isinstance(failure, errors.RepositoryNotFoundError):
        return PiError(
            f"no directory and no hub model is named {model_id}",
            hint="check the spelling; a private model needs `hf auth login`",
        )
    if isinstance(failure, errors.LocalEntryNotFoundError):
        wanted = f"{model_id}@{revision}" if revision else model_id
        if constants.HF_HUB_OFFLINE:
            hint = "unset HF_HUB_OFFLINE to fetch it, or name a local directory"
        else:
            hint = "check the network, or name a local directory"
        return PiError(f"{wanted} is no local directory and is not in the hub cache", hint=hint)
    return PiError(
        f"cannot fetch {model_id}: {failure}", hint="try again, or name a local directory"
    )
