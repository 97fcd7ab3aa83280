"""Documents out of text, JSON lines, parquet and the hub's data sets, one after the other."""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.training.sources import DataSource

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET_ROWS = 1024  # rows read at a time

Record = Mapping[str, Any]
ChatTemplate = Callable[[list[dict[str, str]]], str]


def local_files(source: DataSource) -> list[Path]:
    """Return the files of a local source, sorted by name. Raises PiError where there are none.

    A file of exactly this name is meant itself, whatever of its name could be a pattern.
    """
    if Path(source.path).is_file():
        return [Path(source.path)]
    files = [Path(name) for name in sorted(glob.glob(source.path, recursive=True))]
    files = [path for path in files if path.is_file()]
    if not files:
        raise PiError(f"no file matches {source.path}", hint="check path in dataset_mixture")
    return files


def read_documents(source: DataSource, chat_template: ChatTemplate) -> Iterator[str]:
    """Yield the documents of a source in its own order; empty ones are left out. Raises PiError."""
    return itertools.islice(_documents(source, chat_template), source.max_documents)


def _documents(source: DataSource, chat_template: ChatTemplate) -> Iterator[str]:
    records = _hub_records(source) if source.id else _local_records(source)
    for where, record in records:
        text = record if isinstance(record, str) else _text_of(record, source, chat_template, where)
        if text.strip():
            yield text


def _local_records(source: DataSource) -> Iterator[tuple[str, Record | str]]:
    """Yield (place, record or plain document) of all files."""
    for path in local_files(source):
        suffixes = [suffix for suffix in path.suffixes if suffix not in OPENERS]
        kind = suffixes[-1] if suffixes else ""
        if kind == ".parquet":
            yield from _parquet_records(path)
        elif kind in JSON_LINES:
            yield from _json_records(path)
        else:
            yield from _text_documents(path, source.document_separator)


def _open(path: Path) -> IO[str]:
    opener = OPENERS.get(path.suffix, open)
    stream: IO[str] = opener(path, "rt", encoding="utf-8")
    return stream


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what text and its decompression raise into PiError."""
    try:
        yield
    except UnicodeDecodeError as failure:
        raise PiError(
            f"{path} is not UTF-8 text: {failure}",
            hint="give a text in UTF-8; iconv converts others",
        ) from failure
    except (lzma.LZMAError, zlib.error, EOFError) as failure:
        raise PiError(f"{path} is damaged: {failure}", hint="get the file again") from failure
    except OSError as failure:
        if failure.errno is not None:
            raise
        damage = f"{path} is damaged: {failure}"  # as gzip and bz2 say it
        raise PiError(damage, hint="get the file again") from failure


def _text_documents(path: Path, separator: str) -> Iterator[tuple[str, str]]:
    with _readable(path), _open(path) as stream:
        text = stream.read()
    for part in text.split(separator) if separator else (text,):
        yield str(path), part


def _json_records(path: Path) -> Iterator[tuple[str, Record]]:
    with _readable(path), _open(path) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{path}, line {number}", _json_object(line, f"{path}, line {number}")


def _json_object(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError as failure:
        raise PiError(f"{where} is not JSON: {failure}", hint="one record a line") from failure
    if not isinstance(record, dict):
        raise PiError(f"{where} is no JSON object", hint="one record a line")
    return record


def _parquet_records(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as failure:
        raise PiError(f"{path} needs pyarrow", hint="pip install pyarrow") from failure
    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=PARQUET_ROWS):
                for record in batch.to_pylist():
                    yield str(path), record
    except pyarrow.ArrowInvalid as failure:
        raise PiError(
            f"{path} is not parquet: {failure}", hint="get the file again, or name another text"
        ) from failure


def _hub_records(source: DataSource) -> Iterator[tuple[str, Record]]:
    """Yield the records of a hub data set, which is read as a stream."""
    try:
        import datasets
    except ImportError as failure:
        raise PiError(
            f"the hub's data set {source.id} needs the package datasets",
            hint="pip install 'powerinfer-toolkit[train]', or give local files as path",
        ) from failure
    try:
        records = datasets.load_dataset(
            source.id, source.config, split=source.split, streaming=True
        )
    except (OSError, ValueError, RuntimeError) as failure:
        raise PiError(
            f"cannot read the data set {source.id}: {failure}",
            hint="check id, config and split, and the network",
        ) from failure
    for record in records:
        yield source.id, record


def _text_of(record: Record, source: DataSource, chat_template: ChatTemplate, where: str) -> str:
    """Return a record's text: its chat through the template if it has one, else its text field."""
    messages = record.get(source.messages_column)
    if messages is not None:
        try:
            return chat_template(messages)
        except (TypeError, ValueError, KeyError) as failure:
            raise PiError(
                f"{where}: the chat template fails: {failure}",
                hint="give a source of plain text, or mend the template of the tokenizer",
            ) from failure
    text = record.get(source.text_column)
    if not isinstance(text, str):
        raise PiError(
            f"{where} has no text in {source.text_column} and no {source.messages_column}",
            hint=f"set text_column; the record has {', '.join(map(str, record))}",
        )
    return text
