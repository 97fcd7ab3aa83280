"""One pass over a text, counting which neurons fire: streamed, sharded over processes, resumable."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import transformers
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
from powerinfer_toolkit.training.checkpoint import SparseModel, load_sparse_model
from powerinfer_toolkit.training.corpus import Block, Corpus, TextColumns

_STATE_DIRECTORY = ".resume"


def profile(source: str, output: Path, settings: ProfileSettings) -> ActivationStatistics:
    """Count activations of the checkpoint `source` over settings.data; write them into the directory `output`.

    Under accelerate every process takes its share of the blocks, and the sums are added at the end. The same
    call continues an interrupted one and ends with the same numbers. Raises PiError, also where no token of
    the text counts.
    """
    accelerator = Accelerator()
    output.mkdir(parents=True, exist_ok=True)
    model = load_sparse_model(source, dtype=settings.torch_dtype, device=accelerator.device)
    origin = model.origin()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.source.path)
    columns = TextColumns(settings.text_column, settings.messages_column, settings.split)
    corpus = Corpus(settings.data, tokenizer, settings.max_length, columns)
    tally = DeviceTally(model)
    progress = _Progress(output, accelerator, _identity(settings, origin, accelerator))
    n_done = progress.load(tally)
    blocks = _shard(corpus, settings, accelerator, n_done)
    _count(model, tally, blocks, settings, progress, tokenizer.bos_token_id)
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


def _shard(
    corpus: Corpus, settings: ProfileSettings, accelerator: Accelerator, n_done: int
) -> Iterator[Block]:
    """Yield this process's blocks that are not done yet."""
    n_blocks = None
    if settings.max_tokens is not None:
        n_blocks = settings.max_tokens // settings.max_length
    rank, n_processes = accelerator.process_index, accelerator.num_processes
    return itertools.islice(corpus.blocks(), rank + n_done * n_processes, n_blocks, n_processes)


def _count(
    model: SparseModel,
    tally: DeviceTally,
    blocks: Iterator[Block],
    settings: ProfileSettings,
    progress: _Progress,
    bos: int | None,
) -> None:
    start, n_tokens = time.perf_counter(), 0
    batches = _batches(blocks, settings.per_device_batch_size)
    shown = console.progress(batches, total=None, label="profile", unit="batch")
    for step, batch in enumerate(shown, 1):
        tokens, counted = _pad(batch, bos)
        tally.observe(torch.from_numpy(tokens), torch.from_numpy(counted))
        n_tokens += tokens.size
        progress.n_done += len(batch)
        if step % settings.save_steps == 0:
            progress.save(tally)
    counts = tally.tally()  # waits for the device
    seconds = time.perf_counter() - start
    console.info(f"{counts.tokens[0]} tokens counted, {n_tokens / seconds:,.0f} tokens/s")


def _batches(blocks: Iterator[Block], size: int) -> Iterator[list[Block]]:
    while batch := list(itertools.islice(blocks, size)):
        yield batch


def _pad(blocks: list[Block], bos: int | None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return tokens and which of them count, both [n_sequences, n_positions]; shorter blocks end in padding.

    Attention is causal, so what stands behind a block's end changes nothing in it.
    """
    length = max(block.size for block in blocks)
    tokens = np.zeros((len(blocks), length), np.int64)
    counted = np.zeros(tokens.shape, np.bool_)
    for row, block in enumerate(blocks):
        tokens[row, : block.size] = block
        counted[row, 1 : block.size] = block[1:] != (-1 if bos is None else bos)
    return tokens, counted


def _identity(settings: ProfileSettings, origin: Origin, accelerator: Accelerator) -> str:
    """Return what has to agree between an interrupted run and the one that continues it."""
    values = to_mapping(settings) | {
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

    def load(self, tally: DeviceTally) -> int:
        """Put saved sums into `tally`; return the number of blocks in them."""
        if not self._path.is_file():
            return 0
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
        return self.n_done

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
    for number, source in enumerate(settings.data):
        name = Path(source).name if Path(source).exists() else source
        origins[f"data_{number}"] = Origin(name)
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
