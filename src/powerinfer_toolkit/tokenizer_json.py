"""A tokenizer.json of unknown origin: what is checked before the tokenizers library sees it.

That library trusts its files. Some settings end the process (a subword prefix that cuts characters), take all
memory (normalisers that each lengthen the text) or make ids random (dropout), and its panics are no Exception.
Regexes need no check: Oniguruma gives up a match after ten million steps.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer

from powerinfer_toolkit.errors import PiError

MAX_GROWTH = 256  # how many times longer normalising and cutting may make a text; T5's is 132
_MAX_REPLACEMENT_BYTES = 256  # NFKC's longest is 33, of U+FDFA
_MODELS = ("BPE", "Unigram")
_FORBIDDEN = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
_HINT = "convert the model again, or download the file again"
Json = dict[str, Any]


def load_tokenizer_json(text: str, name: str) -> Tokenizer:
    """Return the tokenizer without truncation and padding; PiError, which starts with `name`."""
    check_tokenizer_json(_parse(text, name), name)
    with library_failures(f"{name} cannot be read"):
        backend = Tokenizer.from_str(text)
        backend.no_truncation()
        backend.no_padding()
    return backend


def check_tokenizer_json(spec: Json, name: str) -> None:
    """Raise PiError where the content of a tokenizer.json could harm."""
    model = spec.get("model")
    if not isinstance(model, dict):
        raise PiError(f"{name} has no model", hint=_HINT)
    kind = model.get("type") or ("BPE" if "merges" in model else "none")
    if kind not in _MODELS:
        raise PiError(f"{name}: a model of type {kind!r:.40} is not supported", hint=_supported())
    for setting in _FORBIDDEN:
        if model.get(setting):
            raise PiError(f"{name}: {setting} is not supported", hint=_supported())
    growth = 1
    for step in _steps([spec.get("normalizer"), spec.get("pre_tokenizer")]):
        growth *= _growth(step, name)
        if growth > MAX_GROWTH:
            raise PiError(f"{name}: it lengthens texts more than {MAX_GROWTH} times", hint=_HINT)


def check_charsmap(table: bytes, name: str) -> int:
    """Return the bytes of the longest replacement in SentencePiece's compiled normalisation.

    The layout is a little-endian u32 size, so many bytes of a double array, then replacements that end in
    a zero byte. PiError where that is not so.
    """
    size = int.from_bytes(table[:4], "little")
    replacements = table[4 + size :]
    if len(table) < 8 or size == 0 or size % 4 or not replacements.endswith(b"\0"):
        raise PiError(f"{name} is damaged: it is no compiled normalisation", hint=_HINT)
    longest = max(map(len, replacements.split(b"\0")))
    if longest > _MAX_REPLACEMENT_BYTES:
        raise PiError(f"{name} is damaged: it writes {longest} bytes for a character", hint=_HINT)
    return longest


@contextmanager
def library_failures(message: str, hint: str = _HINT) -> Iterator[None]:
    """Turn what the tokenizers library raises into a PiError."""
    try:
        yield
    except Exception as failure:  # it raises bare Exception
        if type(failure) is not Exception:
            raise
        raise PiError(f"{message}: {failure}", hint=hint) from failure
    except BaseException as failure:
        if type(failure).__name__ != "PanicException":  # a Rust panic, whose class has no address
            raise
        raise PiError(f"{message}: {failure}", hint=hint) from failure


def _supported() -> str:
    return "supported: BPE and unigram as published models use them"


def _parse(text: str, name: str) -> Json:
    try:
        spec = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as failure:
        raise PiError(f"{name} is no valid JSON: {failure}", hint=_HINT) from failure
    if not isinstance(spec, dict):
        raise PiError(f"{name} is no JSON object", hint=_HINT)
    return spec


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    """Refuse two values under one name: the library may take the other one."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _steps(section: object) -> Iterator[Json]:
    """Yield every object that has a type, at any depth."""
    if isinstance(section, dict):
        if "type" in section:
            yield section
        section = list(section.values())
    if isinstance(section, list):
        for part in section:
            yield from _steps(part)


def _growth(step: Json, name: str) -> int:
    """Return how many times longer one step can make a text."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(text)}, "content": str(content)} if text:
            return max(1, -(-len(content) // len(text)))
        case {"type": "Replace", "content": str(content)}:
            return 1 + len(content)
        case {"type": "Prepend", "prepend": str(prefix)}:
            return 1 + len(prefix)
        case {"type": "ByteLevel" | "Metaspace"}:
            return 2
        case {"type": "Precompiled", "precompiled_charsmap": str(table)}:
            return check_charsmap(_decoded(table, name), f"{name}: its charsmap")
    return 1


def _decoded(table: str, name: str) -> bytes:
    try:
        return base64.b64decode(table, validate=True)
    except binascii.Error as failure:
        raise PiError(f"{name}: its charsmap is damaged: {failure}", hint=_HINT) from failure
