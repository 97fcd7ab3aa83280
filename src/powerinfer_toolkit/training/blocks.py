"""Token blocks: documents split into training and held-out by their text, tokenised, packed, kept on disk."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from powerinfer_toolkit import artifact, console
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.training.documents import ChatTemplate, local_files, read_documents
from powerinfer_toolkit.training.sources import DataSource

TOKENIZE_AT_ONCE = 256  # documents

Blocks = npt.NDArray[np.uint32]  # [blocks, max_length]
Tokenize = Callable[[list[str]], list[list[int]]]


class Split(StrEnum):
    """What a document serves for."""

    TRAIN = "train"
    TEST = "test"
    CALIBRATION = "calibration"


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer as training needs it; `fingerprint` identifies its vocabulary.

    `bos_id` is the token that begins every text of this tokenizer, None where it adds none.
    """

    tokenize: Tokenize
    chat_template: ChatTemplate
    separator_id: int
    fingerprint: str
    bos_id: int | None = None


def text_encoder(tokenizer: Any, separator_token: str | None) -> TextEncoder:  # noqa: ANN401
    """Return the encoder of a transformers tokenizer. Raises PiError where the separator is no token."""
    separator = separator_token or tokenizer.eos_token
    separator_id = tokenizer.get_vocab().get(separator)
    if separator_id is None:
        raise PiError(
            f"{separator!r} is no token of the model", hint="set separator_token to one that is"
        )

    def tokenize(texts: list[str]) -> list[list[int]]:
        encoded = tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def chat_template(messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError  # a requirement of torch

        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateError as failure:
            raise ValueError(str(failure)) from failure

    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    fingerprint = hashlib.sha256(vocabulary).hexdigest()
    first = tokenizer("a")["input_ids"][0]
    bos_id = first if first == tokenizer.bos_token_id else None
    return TextEncoder(tokenize, chat_template, separator_id, fingerprint, bos_id)


def split_of(text: str, held_out_share: float) -> Split:
    """Return the split of a document, from its text alone.

    So equal documents lie on one side wherever and in whatever order they are read; half of those held out
    serve for calibration.
    """
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    if int.from_bytes(digest[:8], "big") >= held_out_share * 2**64:
        return Split.TRAIN
    return Split.TEST if digest[8] & 1 else Split.CALIBRATION


def token_stream(
    source: DataSource, encoder: TextEncoder, documents: Iterable[str] | None = None
) -> Iterator[tuple[str, npt.NDArray[np.uint32]]]:
    """Yield (text, tokens with the separator behind) of every document."""
    texts: list[str] = []
    if documents is None:
        documents = read_documents(source, encoder.chat_template)
    for text in documents:
        texts.append(text)
        if len(texts) == TOKENIZE_AT_ONCE:
            yield from _tokens_of(texts, encoder)
            texts = []
    yield from _tokens_of(texts, encoder)


def _tokens_of(
    texts: list[str], encoder: TextEncoder
) -> Iterator[tuple[str, npt.NDArray[np.uint32]]]:
    if texts:
        for text, ids in zip(texts, encoder.tokenize(texts), strict=True):
            yield text, np.array([*ids, encoder.separator_id], dtype=np.uint32)


def pack(documents: Sequence[npt.NDArray[np.uint32]], max_length: int) -> Blocks:
    """Return [blocks, max_length], the documents one after the other; the last tokens may be left out."""
    tokens = np.concatenate([*documents, np.zeros(0, np.uint32)])
    n_blocks = len(tokens) // max_length
    return tokens[: n_blocks * max_length].reshape(n_blocks, max_length)


class TextSettings(Protocol):
    """What settings say of texts: sources, the share of documents held out, the block's tokens, the order."""

    @property
    def dataset_mixture(self) -> list[DataSource]:
        """Sources to train on."""
        ...

    @property
    def eval_mixture(self) -> list[DataSource]:
        """Held-out sources; none: held_out_share of the documents."""
        ...

    @property
    def held_out_share(self) -> float:
        """Share of the documents that no training sees."""
        ...

    @property
    def max_length(self) -> int:
        """Tokens a block."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the order."""
        ...


class TokenStore:
    """Tokenised sources in `folder`, made once a run, or once for runs that share the folder."""

    def __init__(self, settings: TextSettings, encoder: TextEncoder, folder: Path) -> None:
        self.settings, self.encoder, self.folder = settings, encoder, folder

    def make(self) -> None:
        """Tokenise what is not there yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for source in [*self.settings.dataset_mixture, *self.settings.eval_mixture]:
            if not self._path(source, Split.CALIBRATION).exists():  # the one that is written last
                self._tokenise(source)

    def blocks(self, source: DataSource, split: Split) -> Blocks:
        """Return a source's blocks of one split, mapped from the disk."""
        blocks: Blocks = np.load(self._path(source, split), mmap_mode="r")
        return blocks

    def _tokenise(self, source: DataSource) -> None:
        """Write a file a split, the documents in an order that the seed decides."""
        splits: dict[Split, list[npt.NDArray[np.uint32]]] = {split: [] for split in Split}
        for text, tokens in token_stream(source, self.encoder):
            splits[split_of(text, self._held_out_share(source))].append(tokens)
        for split, documents in splits.items():
            random.Random(self.settings.seed).shuffle(documents)
            packed = pack(documents, self.settings.max_length)
            with artifact.new_file(self._path(source, split), force=True) as path:
                _save(path, packed)
        counts = ", ".join(f"{sum(map(len, splits[split])):,} {split}" for split in splits)
        console.info(f"{source.name}: tokens {counts}")

    def _held_out_share(self, source: DataSource) -> float:
        """Held-out sources are held out whole; with them, training sources are trained on whole."""
        if source in self.settings.eval_mixture:
            return 1.0
        return 0.0 if self.settings.eval_mixture else self.settings.held_out_share

    def _path(self, source: DataSource, split: Split) -> Path:
        files = [] if source.id else [(p.name, p.stat().st_size) for p in local_files(source)]
        made_from = {
            "source": {**asdict(source), "weight": None},
            "files": files,
            "tokenizer": self.encoder.fingerprint,
            "separator": self.encoder.separator_id,
            "max_length": self.settings.max_length,
            "held_out_share": self._held_out_share(source),
            "seed": self.settings.seed,
        }
        key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
        return self.folder / f"{key}.{split}.npy"


def _save(path: Path, blocks: Blocks) -> None:
    """Write an .npy file of any name; unlike numpy's own, a write that fails says why."""
    with path.open("wb") as stream:
        header = np.lib.format.header_data_from_array_1_0(blocks)
        np.lib.format.write_array_header_1_0(stream, header)
        stream.write(np.ascontiguousarray(blocks).data)


def held_out_blocks(store: TokenStore, split: Split, n_blocks: int) -> Blocks:
    """Return at most `n_blocks` held-out blocks, each source in proportion. Raises PiError if none."""
    settings = store.settings
    sources = settings.eval_mixture or settings.dataset_mixture
    found = np.concatenate([store.blocks(source, split) for source in sources])
    if not len(found):
        raise PiError(
            f"no block of {settings.max_length} tokens is held out for {split}",
            hint="raise held_out_share, give eval_mixture, or split text with document_separator",
        )
    order = np.random.default_rng([settings.seed, len(found)]).permutation(len(found))
    return found[order[:n_blocks]]


def weights_of(settings: TextSettings) -> list[float] | None:
    """Return the sources' weights, None where the settings give none."""
    weights = [source.weight for source in settings.dataset_mixture]
    return None if None in weights else [weight for weight in weights if weight is not None]


def mixture_order(
    n_blocks: Sequence[int], weights: Sequence[float] | None, n_samples: int, seed: int
) -> npt.NDArray[np.int64]:
    """Return [n_samples, 2] of (source, block): which block training sees when.

    Without weights every block is seen once an epoch, all sources mixed; with weights a source is drawn for
    every sample and goes through its own blocks, in a new order each time round.
    """
    if weights is None:
        every = np.array([(s, b) for s, n in enumerate(n_blocks) for b in range(n)], dtype=np.int64)
        rounds = -(-n_samples // len(every))
        orders = [np.random.default_rng([seed, r]).permutation(len(every)) for r in range(rounds)]
        return every[np.concatenate(orders)[:n_samples]]
    share = np.array(weights, dtype=np.float64) / sum(weights)
    order = np.empty((n_samples, 2), dtype=np.int64)
    order[:, 0] = np.random.default_rng([seed, 0]).choice(len(share), size=n_samples, p=share)
    for source, n in enumerate(n_blocks):
        places = np.flatnonzero(order[:, 0] == source)
        rounds = -(-len(places) // n)
        orders = [np.random.default_rng([seed, 1, source, r]).permutation(n) for r in range(rounds)]
        order[places, 1] = np.concatenate([*orders, np.zeros(0, np.int64)])[: len(places)]
    return order


class TrainingBlocks:
    """The blocks to train on, of all sources, in the order that seed and weights decide; mapped from the disk.

    At most `max_blocks` of them, None: all. Where the tokenizer begins texts with BOS, so does every block, as
    every text does when the model runs. Raises PiError where there are none.
    """

    def __init__(self, store: TokenStore, max_blocks: int | None = None) -> None:
        settings = store.settings
        self._sources = [store.blocks(source, Split.TRAIN) for source in settings.dataset_mixture]
        self._bos_id = store.encoder.bos_id
        counts = [len(found) for found in self._sources]
        total = sum(counts)
        if min(counts) == 0:
            raise PiError(
                f"{settings.dataset_mixture[counts.index(0)].name} has no block of {settings.max_length} tokens",
                hint="give more text, or lower max_length or held_out_share",
            )
        n = total if max_blocks is None else min(total, max_blocks)
        self._order = mixture_order(counts, weights_of(settings), n, settings.seed)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._order)

    def rows(self, numbers: Sequence[int] | npt.NDArray[np.int64]) -> Blocks:
        """Return the blocks with these numbers, [len(numbers), max_length]."""
        chosen = self._order[np.asarray(numbers, dtype=np.int64)]
        rows = np.stack([self._sources[source][block] for source, block in chosen])
        return begun_by(rows, self._bos_id)


def begun_by(blocks: Blocks, bos_id: int | None) -> Blocks:
    """Return the blocks with BOS in place of their first token, where the tokenizer has it there."""
    if bos_id is None:
        return blocks
    blocks = blocks.copy()
    blocks[:, 0] = bos_id
    return blocks
