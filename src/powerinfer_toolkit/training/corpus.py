"""Texts from files or the hub as blocks of token ids, streamed: memory does not grow with the text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.errors import PiError, UsageError

_PIECE_CHARACTERS = 1 << 16  # of a plain text that is encoded at a time
_BATCH_TEXTS = 64

Block = NDArray[np.int64]  # [n_positions]; position 0 comes first


@dataclass(frozen=True)
class TextColumns:
    """Where records hold their text: `text`, or a conversation under `messages`; and the hub's split."""

    text: str = "text"
    messages: str = "messages"
    split: str = "train"


class Corpus:
    """Blocks of at most `length` tokens from `sources`, in order, each begun anew at position 0.

    A source is a .txt, .jsonl or .parquet file, a .npy file of token ids ([n], or [n_blocks, length]), or
    `id[:configuration]` of the hub (through datasets). Texts are joined by EOS and cut; where the tokenizer
    puts BOS before a text, every block starts with it. A block has at least two tokens.
    """

    def __init__(
        self,
        sources: Sequence[str],
        tokenizer: Any,  # noqa: ANN401 - transformers' own
        length: int,
        columns: TextColumns | None = None,
    ) -> None:
        if length < 2:
            raise UsageError(
                f"blocks of {length} tokens hold nothing to predict", hint="give 2 or more"
            )
        if not sources:
            raise UsageError("no text given", hint="name files or a data set of the hub")
        self._sources = list(sources)
        self._tokenizer = tokenizer
        self._length = length
        self._columns = columns or TextColumns()
        self._bos = _first_token(tokenizer)

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks from the beginning; every call gives the same ones."""
        step = self._length - len(self._bos)
        pieces = itertools.chain.from_iterable(map(self._tokens, self._sources))
        left = np.empty(0, np.int64)
        for piece in pieces:
            left = np.concatenate([left, piece])
            whole = left.size // step * step
            for row in left[:whole].reshape(-1, step):
                yield np.concatenate([self._bos, row])
            left = left[whole:]
        if left.size + len(self._bos) > 1:
            yield np.concatenate([self._bos, left])

    def _tokens(self, source: str) -> Iterator[Block]:
        if Path(source).suffix == ".npy":
            yield from _saved_tokens(Path(source), len(self._tokenizer))
            return
        eos = self._tokenizer.eos_token_id
        for batch in _batches(_texts(source, self._columns, self._tokenizer), _BATCH_TEXTS):
            encoded = self._tokenizer([text for text, _ in batch], add_special_tokens=False)
            for ids, (_, ends) in zip(encoded["input_ids"], batch, strict=True):
                yield np.asarray([*ids, eos] if ends and eos is not None else ids, np.int64)


def _first_token(tokenizer: Any) -> Block:  # noqa: ANN401
    """Return BOS where the tokenizer puts it before a text, else nothing."""
    ids = tokenizer("a")["input_ids"]
    adds_bos = tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    return np.asarray(ids[:1] if adds_bos else [], np.int64)


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def _saved_tokens(path: Path, n_vocab: int) -> Iterator[Block]:
    """Yield the ids of a .npy file in pieces."""
    try:
        saved = np.load(path, mmap_mode="r", allow_pickle=False).reshape(-1)
    except (ValueError, EOFError, OSError) as failure:
        raise PiError(f"{path} is no numpy array file: {failure}") from failure
    for begin in range(0, saved.size, _PIECE_CHARACTERS):
        piece = np.asarray(saved[begin : begin + _PIECE_CHARACTERS])
        if piece.dtype.kind not in "iu" or piece.min() < 0 or piece.max() >= n_vocab:
            raise PiError(f"{path} holds other things than token ids below {n_vocab}")
        yield piece.astype(np.int64)


def _texts(source: str, columns: TextColumns, tokenizer: Any) -> Iterator[tuple[str, bool]]:  # noqa: ANN401
    """Yield pieces of text, each with whether a document ends there."""
    path = Path(source)
    if path.suffix in (".jsonl", ".parquet") or not path.exists():
        for record in _records(path, source, columns):
            yield _text_of(record, columns, tokenizer, source), True
    elif path.is_file():
        yield from _plain_text(path)
    else:
        raise PiError(f"{source} is a directory", hint="name the files in it")


def _plain_text(path: Path) -> Iterator[tuple[str, bool]]:
    try:
        with path.open(encoding="utf-8") as stream:
            while lines := stream.readlines(_PIECE_CHARACTERS):
                yield "".join(lines), False
    except UnicodeDecodeError as failure:
        raise PiError(f"{path} is not UTF-8: {failure.reason} at byte {failure.start}") from failure
    yield "", True


def _records(path: Path, source: str, columns: TextColumns) -> Iterator[dict[str, Any]]:
    if not path.exists():
        yield from _hub_records(source, columns)
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(_BATCH_TEXTS):
            yield from batch.to_pylist()
    else:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                yield _parsed(line, path, number)


def _parsed(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as failure:
        raise PiError(f"{path}, line {number} is not JSON: {failure}") from failure
    if not isinstance(record, dict):
        raise PiError(f"{path}, line {number} is no JSON object")
    return record


def _hub_records(source: str, columns: TextColumns) -> Iterator[dict[str, Any]]:
    try:
        import datasets
    except ImportError as failure:
        raise PiError(
            f"{source} is no file, and data sets of the hub need the package datasets",
            hint="check the path, or pip install datasets",
        ) from failure
    name, _, configuration = source.partition(":")
    try:
        yield from datasets.load_dataset(
            name, configuration or None, split=columns.split, streaming=True
        )
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as failure:
        raise PiError(
            f"cannot read {source}: {failure}", hint="check the path or the data set's name"
        ) from failure


def _text_of(
    record: dict[str, Any],
    columns: TextColumns,
    tokenizer: Any,  # noqa: ANN401
    source: str,
) -> str:
    if isinstance(record.get(columns.messages), list):
        return str(tokenizer.apply_chat_template(record[columns.messages], tokenize=False))
    if not isinstance(record.get(columns.text), str):
        raise PiError(
            f"{source} has a record without {columns.text!r}: it has {', '.join(map(repr, record))}",
            hint="name the column of the text",
        )
    return str(record[columns.text])
