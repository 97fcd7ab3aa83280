"""One pass over a text, counting which neurons fire: streamed, sharded over processes, resumable."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save

from powerinfer_toolkit import console
from powerinfer_toolkit.artifact import Manifest, Origin, new_file
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.profile_activations.device_tally import DeviceTally
from powerinfer_toolkit.profile_activations.settings import ProfileSettings
from powerinfer_toolkit.settings import to_mapping
from powerinfer_toolkit.statistics import EXCLUDED, FILE_NAME, KIND, ActivationStatistics, Tally
from powerinfer_toolkit.training.blocks import TokenStore, TrainingBlocks, text_encoder
from powerinfer_toolkit.training.checkpoint import load_sparse_model, load_tokenizer

_STATE_DIRECTORY = ".resume"
_FREE = ("token_dir", "save_steps", "upstream")  # settings that change no count


def profile(source: str, output: Path, settings: ProfileSettings) -> ActivationStatistics:
    """Count activations of the checkpoint `source` over the texts; write them into the directory `output`.

    Under accelerate every process takes its share of the blocks, and the sums are added at the end. The same
    call continues an interrupted one and ends with the same numbers. Raises PiError, also where no token of
    the text counts.
    """
    accelerator = Accelerator()
    output.mkdir(parents=True, exist_ok=True)
    model = load_sparse_model(
        source,
        device=accelerator.device,
        dtype=settings.torch_dtype,
        trust_remote_code=settings.trust_remote_code,
    )
    origin = model.origin()
    encoder = text_encoder(load_tokenizer(model.source), settings.separator_token)
    store = TokenStore(settings, encoder, Path(settings.token_dir or output / "tokens"))
    with accelerator.main_process_first():
        store.make()
    max_blocks = None if settings.max_tokens is None else settings.max_tokens // settings.max_length
    blocks = TrainingBlocks(store, max_blocks)
    tally = DeviceTally(model)
    progress = _Progress(output, accelerator, _identity(settings, origin, accelerator))
    progress.load(tally)
    _count(tally, blocks, settings, progress, encoder.bos_id)
    statistics = ActivationStatistics(tally.merged(accelerator), _manifest(settings, origin))
    if statistics.n_tokens == 0:
        raise PiError("no token of the text counts", hint=f"not counted are {EXCLUDED}")
    if accelerator.is_main_process:
        statistics.save(output / FILE_NAME)
        if settings.upstream:
            _write_upstream(output / "activation", statistics.tally.counts)
    accelerator.wait_for_everyone()
    progress.remove()
    return statistics


def _count(
    tally: DeviceTally,
    blocks: TrainingBlocks,
    settings: ProfileSettings,
    progress: _Progress,
    bos_id: int | None,
) -> None:
    """Count this process's share of the blocks, but those that are counted already."""
    accelerator, size = progress.accelerator, settings.per_device_batch_size
    share = range(accelerator.process_index, len(blocks), accelerator.num_processes)
    begins = range(progress.n_done, len(share), size)
    start = time.perf_counter()
    shown = console.progress(begins, total=len(begins), label="profile", unit="batch")
    for step, begin in enumerate(shown, 1):
        tokens = torch.from_numpy(blocks.rows(share[begin : begin + size]).astype(np.int64))
        tally.observe(tokens, tokens != (-1 if bos_id is None else bos_id))
        progress.n_done = begin + len(tokens)
        if step % settings.save_steps == 0:
            progress.save(tally)
    tally.tally()  # waits for the device
    n_tokens = (len(share) - (begins.start if begins else len(share))) * settings.max_length
    console.info(f"{n_tokens / (time.perf_counter() - start):,.0f} tokens/s")


def _identity(settings: ProfileSettings, origin: Origin, accelerator: Accelerator) -> str:
    """Return what has to agree between an interrupted run and the one that continues it."""
    values = {n: v for n, v in to_mapping(settings).items() if n not in _FREE} | {
        "weights": origin.sha256,
        "name": origin.name,
        "processes": accelerator.num_processes,
    }
    return json.dumps(values, sort_keys=True)


@dataclass
class _Progress:
    """What an interrupted run leaves behind: each process's sums and how many of its blocks are in them."""

    output: Path
    accelerator: Accelerator
    identity: str
    n_done: int = 0

    @property
    def _path(self) -> Path:
        rank = self.accelerator.process_index
        return self.output / _STATE_DIRECTORY / f"process_{rank}.safetensors"

    def load(self, tally: DeviceTally) -> None:
        """Put saved sums into `tally`, and how many blocks are in them into n_done."""
        if not self._path.is_file():
            return
        with safe_open(self._path, "np") as file:
            metadata = file.metadata()
            arrays = [file.get_tensor(field.name) for field in fields(Tally)]
        if metadata["identity"] != self.identity:
            raise PiError(
                f"{self._path.parent} belongs to a run with other settings, weights or processes",
                hint="repeat that run's settings to continue it, or remove the directory",
            )
        tally.load(Tally(*arrays))
        self.n_done = int(metadata["blocks"])
        console.info(f"continuing after {self.n_done} blocks")

    def save(self, tally: DeviceTally) -> None:
        """Write the sums so far."""
        self._path.parent.mkdir(exist_ok=True)
        metadata = {"identity": self.identity, "blocks": str(self.n_done)}
        with new_file(self._path, force=True) as temporary:
            temporary.write_bytes(save(tally.tally().arrays(), metadata))

    def remove(self) -> None:
        """Forget it: the run is complete."""
        if self.accelerator.is_main_process:
            shutil.rmtree(self._path.parent, ignore_errors=True)


def _manifest(settings: ProfileSettings, origin: Origin) -> Manifest:
    origins = {"weights": origin}
    for number, source in enumerate(settings.dataset_mixture):
        origins[f"text_{number}"] = Origin(source.id or Path(source.path).name)
    kept: dict[str, str | int | float | bool] = {
        "max_length": settings.max_length,
        "max_tokens": settings.max_tokens or -1,
        "torch_dtype": settings.torch_dtype,
        "excluded": EXCLUDED,
    }
    return Manifest(KIND, origins, kept)


def _write_upstream(directory: Path, counts: NDArray[np.int64]) -> None:
    """Write one torch tensor [n_ff] a layer."""
    directory.mkdir(exist_ok=True)
    for layer, row in enumerate(counts):
        with new_file(directory / f"activation_{layer}.pt", force=True) as temporary:
            torch.save(torch.from_numpy(row.copy()), temporary)
