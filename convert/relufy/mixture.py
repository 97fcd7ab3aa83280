"""Training data in a fixed order: a map of samples for data on disk, or a stream that can be replayed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from powerinfer_toolkit.convert.relufy.settings import RelufySettings
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.training import blocks
from powerinfer_toolkit.training.blocks import Blocks, Split, TextEncoder, TokenStore
from powerinfer_toolkit.training.documents import read_documents
from powerinfer_toolkit.training.sources import DataSource

Sample = dict[str, Tensor]


def to_sample(block: npt.NDArray[np.uint32]) -> Sample:
    """Return a block as the model wants it."""
    return {"input_ids": torch.from_numpy(block.astype(np.int64))}


class MappedMixture(Dataset[Sample]):
    """All samples of a run by number, so that continuing at a step is a matter of an index."""

    def __init__(self, settings: RelufySettings, store: TokenStore, samples_a_step: int) -> None:
        self.sources = [store.blocks(source, Split.TRAIN) for source in settings.dataset_mixture]
        for source, found in zip(settings.dataset_mixture, self.sources, strict=True):
            if not len(found):
                raise PiError(
                    f"{source.name} has no block of {settings.max_length} tokens to train on",
                    hint="give more text, or lower max_length or held_out_share",
                )
        counts = [len(found) for found in self.sources]
        steps = settings.max_steps
        if steps < 0:
            steps = max(1, math.floor(settings.num_train_epochs * sum(counts) / samples_a_step))
        self.n_steps = steps
        n_samples = max(steps, 1) * samples_a_step  # no loader takes an empty data set
        weights = blocks.weights_of(settings)
        self.order = blocks.mixture_order(counts, weights, n_samples, settings.seed)

    def __len__(self) -> int:
        """Return the number of samples of the whole run."""
        return len(self.order)

    def __getitem__(self, index: int) -> Sample:
        """Return the sample that training sees as number `index`."""
        source, block = self.order[index]
        return to_sample(self.sources[source][block])


class StreamedMixture(IterableDataset[Sample]):
    """The same from sources that are read while training; every iteration gives the same samples.

    Sources are drawn by weight, read round and round, and shuffled within a buffer. A run that continues
    reads the stream again up to where it was.
    """

    def __init__(self, settings: RelufySettings, encoder: TextEncoder) -> None:
        self.settings, self.encoder = settings, encoder
        self.n_steps = settings.max_steps

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples from the first on, without end."""
        sources = self.settings.dataset_mixture
        streams = [self._blocks(source, number) for number, source in enumerate(sources)]
        draw = random.Random(self.settings.seed)
        weights = blocks.weights_of(self.settings)
        while True:
            (stream,) = draw.choices(streams, weights)
            yield to_sample(next(stream))

    def _blocks(self, source: DataSource, number: int) -> Iterator[npt.NDArray[np.uint32]]:
        length, held_out = self.settings.max_length, self.settings.held_out_share
        share = 0.0 if self.settings.eval_mixture else held_out
        shuffle = random.Random(f"{self.settings.seed} {number}")
        rest = np.zeros(0, np.uint32)
        while True:
            found = False
            texts = read_documents(source, self.encoder.chat_template)
            train = (text for text in texts if blocks.split_of(text, share) == Split.TRAIN)
            shuffled = _shuffled(train, self.settings.shuffle_buffer, shuffle)
            for _, tokens in blocks.token_stream(source, self.encoder, shuffled):
                rest = np.concatenate([rest, tokens])
                while len(rest) >= length:
                    found = True
                    yield rest[:length]
                    rest = rest[length:]
            if not found:
                raise PiError(
                    f"{source.name} has no block of {length} tokens to train on",
                    hint="give more text, or a smaller max_length",
                )


def _shuffled(items: Iterator[str], buffer_size: int, draw: random.Random) -> Iterator[str]:
    """Yield the items, each swapped out of a buffer at random."""
    buffer: list[str] = []
    for item in items:
        if len(buffer) < buffer_size:
            buffer.append(item)
            continue
        place = draw.randrange(buffer_size)
        buffer[place], item = item, buffer[place]
        yield item
    draw.shuffle(buffer)
    yield from buffer


def streamed_held_out(settings: RelufySettings, encoder: TextEncoder, split: Split) -> Blocks:
    """Return the first `eval_blocks` held-out blocks of the sources, read as far as that takes."""
    share = 1.0 if settings.eval_mixture else settings.held_out_share
    found: list[npt.NDArray[np.uint32]] = []
    sources = settings.eval_mixture or settings.dataset_mixture
    for number, source in enumerate(sources, 1):
        wanted = settings.eval_blocks * settings.max_length * number / len(sources)
        texts = read_documents(source, encoder.chat_template)
        held_out = (text for text in texts if blocks.split_of(text, share) == split)
        for _, tokens in blocks.token_stream(source, encoder, held_out):
            found.append(tokens)
            if sum(map(len, found)) >= wanted:
                break
    packed = blocks.pack(found, settings.max_length)[: settings.eval_blocks]
    if not len(packed):
        raise PiError(f"the streams hold no block out for {split}", hint="give eval_mixture")
    return packed


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Stack samples to [batch, max_length]."""
    return {"input_ids": torch.stack([sample["input_ids"] for sample in samples])}
