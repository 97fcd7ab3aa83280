"""Reads `tokenizer.model`: the few fields of SentencePiece's ModelProto that a tokenizer is made of.

Field numbers are those of sentencepiece_model.proto; the encoding is protocol buffers' wire format.
Reading it here spares the base install the protobuf package.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.tokenizer_format import TokenType

UNIGRAM, BPE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
Field = tuple[int, int | bytes]
_Reader = Callable[[int | bytes], int | bytes]


@dataclass
class SentencePieceModel:
    """Pieces by id and the settings of trainer and normaliser; the defaults are the proto's."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)  # TokenType has SentencePiece's numbers
    model_type: int = UNIGRAM
    byte_fallback: bool = False
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    whitespace_as_suffix: bool = False


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Parse `path`; PiError where it is no BPE or unigram SentencePiece model."""
    try:
        model = _parse(path.read_bytes())
        if not model.pieces:
            raise ValueError("no pieces")
    except (ValueError, IndexError, struct.error) as failure:
        raise PiError(
            f"{path} is not a SentencePiece model",
            hint="tiktoken files named tokenizer.model need the tokenizer.json of the checkpoint",
        ) from failure
    if model.model_type not in (UNIGRAM, BPE):
        raise PiError(
            f"{path} is neither a BPE nor a unigram SentencePiece model",
            hint="train it as one of these, or give a tokenizer.json beside it",
        )
    if not model.escape_whitespaces or model.whitespace_as_suffix:
        raise PiError(
            f"{path} does not mark spaces with a leading \u2581, which is not supported",
            hint="give a tokenizer.json beside it",
        )
    return model


def _parse(data: bytes) -> SentencePieceModel:
    model = SentencePieceModel()
    for number, value in _fields(data):
        if number == 1:
            _read_piece(model, _message(value))
        elif number == 2:
            _read_specification(model, _message(value), _TRAINER)
        elif number == 3:
            _read_specification(model, _message(value), _NORMALISER)
    return model


def _read_piece(model: SentencePieceModel, data: bytes) -> None:
    text, score, kind = "", 0.0, int(TokenType.NORMAL)
    for number, value in _fields(data):
        if number == 1:
            text = _message(value).decode("utf-8")
        elif number == 2:
            (score,) = struct.unpack("<f", _message(value))
        elif number == 3:
            kind = _integer(value)
    model.pieces.append(text)
    model.scores.append(score)
    model.types.append(kind)


def _read_specification(
    model: SentencePieceModel, data: bytes, meanings: dict[int, tuple[str, _Reader]]
) -> None:
    """Set what the fields of a TrainerSpec or NormalizerSpec mean; others are passed over."""
    for number, value in _fields(data):
        if number in meanings:
            name, read = meanings[number]
            setattr(model, name, read(value))


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes belong")
    return value


def _integer(value: int | bytes) -> int:
    """Return a varint as int32."""
    if not isinstance(value, int):
        raise ValueError("bytes where a number belongs")
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


def _fields(data: bytes) -> Iterator[Field]:
    """Yield (number, varint or raw bytes) of every field of one message."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        if tag & 7 == _VARINT:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if tag & 7 == _BYTES:
            size, position = _varint(data, position)
        elif tag & 7 in (_FIXED32, _FIXED64):
            size = 4 if tag & 7 == _FIXED32 else 8
        else:
            raise ValueError("unknown wire type")
        if position + size > len(data):
            raise ValueError("truncated field")
        yield tag >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise ValueError("varint too long")


# Field number -> name in SentencePieceModel, and how its value is read.
_TRAINER: dict[int, tuple[str, _Reader]] = {
    3: ("model_type", _integer),
    24: ("whitespace_as_suffix", bool),
    35: ("byte_fallback", bool),
    40: ("unk_id", _integer),
    41: ("bos_id", _integer),
    42: ("eos_id", _integer),
    43: ("pad_id", _integer),
}
_NORMALISER: dict[int, tuple[str, _Reader]] = {
    2: ("charsmap", _message),
    3: ("add_dummy_prefix", bool),
    4: ("remove_extra_whitespaces", bool),
    5: ("escape_whitespaces", bool),
}
