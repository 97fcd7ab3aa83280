"""From the tokenizer files of a Hugging Face checkpoint to GGUF keys."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFValueType
from tokenizers import Tokenizer

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.sentencepiece_model import SentencePieceModel
from powerinfer_toolkit.tokenizer_files import (
    TokenizerFiles,
    malformed_files,
    read_tokenizer_files,
    token_text,
)
from powerinfer_toolkit.tokenizer_format import (
    BYTE_TOKEN,
    SPACE,
    TokenizerKey,
    TokenizerModel,
    TokenType,
    padding_name,
)
from powerinfer_toolkit.tokenizer_json import library_failures, load_tokenizer_json
from powerinfer_toolkit.tokenizer_pre import PRE_TOKENIZERS, recognise

_BYTE_LEVEL_SPACE = "\u0120"


class MetadataEntry(NamedTuple):
    """One GGUF key; the types are `gguf.GGUFValueType`, `element_type` is None unless it is an ARRAY."""

    name: str
    value_type: GGUFValueType
    value: Any
    element_type: GGUFValueType | None = None


@dataclass(frozen=True)
class TokenizerKeys:
    """Everything a GGUF file says about its tokenizer, in the order to write it."""

    model: TokenizerModel
    pre: str
    n_tokens: int  # without the padding up to the embedding's rows
    keys: list[MetadataEntry]


@dataclass(frozen=True)
class _Source:
    """A checkpoint's tokenizer, understood as far as GGUF needs."""

    files: TokenizerFiles
    backend: Tokenizer
    model: TokenizerModel
    tokens: dict[int, str]  # by id, with gaps
    ids: dict[str, int]
    pieces: SentencePieceModel | None  # where it says the same as tokenizer.json

    @property
    def section(self) -> dict[str, Any]:
        """The `model` of tokenizer.json."""
        section: dict[str, Any] = self.files.spec["model"]
        return section

    @property
    def added_tokens(self) -> list[dict[str, Any]]:
        """The `added_tokens` of tokenizer.json."""
        return self.files.spec.get("added_tokens") or []


def tokenizer_metadata(model_dir: Path, n_vocab: int) -> TokenizerKeys:
    """Return the GGUF keys for the tokenizer in `model_dir` of a model with `n_vocab` embedding rows.

    Missing rows become unused tokens `[PAD{id}]`, llama.cpp's convention. PiError where there is no
    tokenizer, its kind is not supported or it has more tokens than the model has rows.
    """
    with malformed_files(model_dir), library_failures(f"{model_dir}: its tokenizer fails"):
        return _keys(model_dir, n_vocab)


def _keys(model_dir: Path, n_vocab: int) -> TokenizerKeys:
    files = read_tokenizer_files(model_dir)
    text = json.dumps(files.spec, ensure_ascii=False, separators=(",", ":"))
    backend = load_tokenizer_json(text, f"{model_dir}: its tokenizer")
    source = _understand(files, backend, model_dir)
    n_tokens = max(source.tokens, default=-1) + 1
    if n_tokens > n_vocab:
        raise PiError(
            f"the tokenizer has {n_tokens} tokens, the model only {n_vocab} embedding rows",
            hint="tokenizer and weights are of different checkpoints, or tokens were only added",
        )
    pre = _pre_name(source)
    keys = [
        _text(TokenizerKey.MODEL, source.model),
        _text(TokenizerKey.PRE, pre),
        *_token_arrays(source, n_vocab),
        *_model_keys(source, n_vocab),
        *_special_ids(source),
        *_framing(source),
    ]
    if files.chat_template is not None:
        keys.append(_text(TokenizerKey.CHAT_TEMPLATE, files.chat_template))
    keys.append(_text(Key.TOKENIZER_JSON, text))
    return TokenizerKeys(source.model, pre, n_tokens, keys)


def _understand(files: TokenizerFiles, backend: Tokenizer, model_dir: Path) -> _Source:
    spec = files.spec
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, list):
        tokens = {token_id: piece for token_id, (piece, _) in enumerate(vocabulary)}
    else:
        tokens = {token_id: token for token, token_id in vocabulary.items()}
    added = {token["id"]: token["content"] for token in spec.get("added_tokens") or []}
    tokens.update(added)
    pieces = files.sentencepiece
    if pieces is not None:
        own = enumerate(pieces.pieces)
        agree = all(i in added or tokens.get(i) == piece for i, piece in own)
        pieces = pieces if agree else None
    ids = {token: token_id for token_id, token in tokens.items()}
    return _Source(files, backend, _model_kind(spec, model_dir), tokens, ids, pieces)


def _model_kind(spec: dict[str, Any], model_dir: Path) -> TokenizerModel:
    model = spec["model"]
    kind = model.get("type") or ("BPE" if "merges" in model else "unknown")
    if kind == "Unigram":
        return TokenizerModel.SENTENCEPIECE_UNIGRAM
    if kind == "BPE" and _mentions(spec.get("pre_tokenizer"), "ByteLevel"):
        return TokenizerModel.BYTE_LEVEL_BPE
    if kind == "BPE" and model.get("byte_fallback"):
        return TokenizerModel.SENTENCEPIECE_BPE
    raise PiError(
        f"{model_dir}: unsupported tokenizer of type {kind}",
        hint="supported: byte-level BPE, SentencePiece BPE with byte fallback, unigram",
    )


def _pre_name(source: _Source) -> str:
    if source.model is not TokenizerModel.BYTE_LEVEL_BPE:
        return "default"
    spec = source.files.spec
    ignore_merges = bool(source.section.get("ignore_merges"))
    nfc = _mentions(spec.get("normalizer"), "NFC")
    name = recognise(spec["pre_tokenizer"], ignore_merges=ignore_merges, nfc=nfc)
    if name is None:
        console.warning(
            "unknown pre_tokenizer in tokenizer.json: other engines will cut words as 'default' does"
        )
        return "default"
    row = PRE_TOKENIZERS[name]
    if (row.ignore_merges, row.nfc) != (ignore_merges, nfc):
        console.warning(
            f"tokenizer.json differs from {name!r}, which cuts alike, in ignore_merges or NFC: "
            "other engines will not know"
        )
    return name


def _token_arrays(source: _Source, n_vocab: int) -> list[MetadataEntry]:
    """Return tokens and types. User-defined pieces have real spaces in GGUF, as llama.cpp seeks them."""
    types = _token_types(source, n_vocab)
    tokens = [source.tokens.get(token_id, padding_name(token_id)) for token_id in range(n_vocab)]
    if source.model is not TokenizerModel.BYTE_LEVEL_BPE:
        for token_id, kind in enumerate(types):
            if kind == TokenType.USER_DEFINED:
                tokens[token_id] = tokens[token_id].replace(SPACE, " ")
    return [
        _array(TokenizerKey.TOKENS, tokens, GGUFValueType.STRING),
        _array(TokenizerKey.TOKEN_TYPE, types, GGUFValueType.INT32),
    ]


def _token_types(source: _Source, n_vocab: int) -> list[int]:
    """Return a TokenType per row: SentencePiece's own where it is known, then the added tokens'."""
    types = [int(TokenType.UNUSED)] * n_vocab
    sentencepiece = source.model is not TokenizerModel.BYTE_LEVEL_BPE
    for token_id, token in source.tokens.items():
        is_byte = sentencepiece and BYTE_TOKEN.fullmatch(token)
        types[token_id] = int(TokenType.BYTE if is_byte else TokenType.NORMAL)
        if token == padding_name(token_id):
            types[token_id] = int(TokenType.UNUSED)
    if source.pieces is not None:
        types[: len(source.pieces.types)] = source.pieces.types
    for added in source.added_tokens:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        types[added["id"]] = int(kind)
    unknown = _unknown_id(source.section)
    if unknown is not None and sentencepiece:
        types[unknown] = int(TokenType.UNKNOWN)
    return types


def _unknown_id(section: dict[str, Any]) -> int | None:
    if isinstance(section["vocab"], list):
        unknown = section.get("unk_id")
    else:
        unknown = section["vocab"].get(section.get("unk_token"))
    return unknown if isinstance(unknown, int) else None


def _model_keys(source: _Source, n_vocab: int) -> list[MetadataEntry]:
    """Return merges for byte-level BPE; scores and the normaliser's rules for SentencePiece."""
    if source.model is TokenizerModel.BYTE_LEVEL_BPE:
        merges = [" ".join(pair) for pair in _merge_pairs(source.section)]
        return [_array(TokenizerKey.MERGES, merges, GGUFValueType.STRING)] if merges else []
    keys = [_array(TokenizerKey.SCORES, _scores(source, n_vocab), GGUFValueType.FLOAT32)]
    one, two = (source.backend.encode(text, add_special_tokens=False) for text in ("a b", "a  b"))
    if one.ids == two.ids:
        keys.append(_flag(TokenizerKey.REMOVE_EXTRA_WHITESPACES, True))
    charsmap = _find(source.files.spec.get("normalizer"), "precompiled_charsmap")
    if isinstance(charsmap, str) and charsmap:
        table = base64.b64decode(charsmap)
        keys.append(_array(TokenizerKey.PRECOMPILED_CHARSMAP, table, GGUFValueType.UINT8))
    return keys


def _merge_pairs(section: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the merges, which older files write as one text with a space between."""
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in section["merges"])
    return [(left, right) for left, right in pairs]


def _scores(source: _Source, n_vocab: int) -> list[float]:
    """Return SentencePiece's score per row: tokenizer.model's, the unigram's or -rank of the merge.

    Rows that no model knows get the lowest score of all.
    """
    vocabulary = source.section["vocab"]
    if source.pieces is not None:
        scores = list(source.pieces.scores)
    elif isinstance(vocabulary, list):
        scores = [float(score) for _, score in vocabulary]
    else:
        rank: dict[str, int] = {}
        for left, right in _merge_pairs(source.section):
            rank.setdefault(left + right, len(rank))
        tokens = (source.tokens.get(token_id, "") for token_id in range(n_vocab))
        scores = [-float(rank.get(token, len(rank))) for token in tokens]
    lowest = min(scores, default=0.0)
    return scores + [lowest] * (n_vocab - len(scores))


def _special_ids(source: _Source) -> list[MetadataEntry]:
    roles = {
        "bos": TokenizerKey.BOS_ID,
        "eos": TokenizerKey.EOS_ID,
        "unk": TokenizerKey.UNK_ID,
        "pad": TokenizerKey.PAD_ID,
    }
    found = {role: _special_id(source, role) for role in roles}
    keys = [_integer(roles[role], value) for role, value in found.items() if value is not None]
    ends = source.files.generation_config.get("eos_token_id")
    for token_id in ends if isinstance(ends, list) else []:
        if token_id in source.tokens and token_id != found["eos"]:
            return [*keys, _integer(TokenizerKey.EOT_ID, token_id)]
    return keys


def _special_id(source: _Source, role: str) -> int | None:
    """Return the id of the "bos", "eos", "unk" or "pad" token, by name before by number."""
    files = source.files
    for named in (files.config, files.special_tokens_map):
        text = token_text(named.get(f"{role}_token"))
        if text in source.ids:
            return source.ids[text]
    if files.sentencepiece is not None:
        numbered = getattr(files.sentencepiece, f"{role}_id")
    else:
        numbered = files.model_config.get(f"{role}_token_id")
    if isinstance(numbered, list):
        numbered = numbered[0] if numbered else None
    return numbered if numbered in source.tokens else None


def _framing(source: _Source) -> list[MetadataEntry]:
    """Return what is put before and after a text, seen by encoding one."""
    plain = source.backend.encode("a", add_special_tokens=False)
    framed = source.backend.encode("a").ids
    n = len(plain.ids)
    start = next((i for i in range(len(framed)) if framed[i : i + n] == plain.ids), 0)
    byte_level = source.model is TokenizerModel.BYTE_LEVEL_BPE
    space = _BYTE_LEVEL_SPACE if byte_level else SPACE
    prefixed = bool(plain.tokens) and plain.tokens[0].startswith(space)
    return [
        _flag(TokenizerKey.ADD_BOS, _frames(source, "bos", framed[:start])),
        _flag(TokenizerKey.ADD_EOS, _frames(source, "eos", framed[start + n :])),
        _flag(TokenizerKey.ADD_SPACE_PREFIX, prefixed),
    ]


def _frames(source: _Source, role: str, added: list[int]) -> bool:
    """Return whether bos or eos is added: as tokenizer_config.json states, else as `added` shows."""
    token_id = _special_id(source, role)
    if added and added != [token_id]:
        console.warning(f"the tokenizer adds the tokens {added}, which GGUF cannot express")
    stated = source.files.config.get(f"add_{role}_token")
    return token_id is not None and bool(added if stated is None else stated)


def _mentions(section: object, kind: str) -> bool:
    """Return whether a section of tokenizer.json has a step of type `kind` at any depth."""
    if isinstance(section, dict):
        return section.get("type") == kind or any(_mentions(v, kind) for v in section.values())
    return isinstance(section, list) and any(_mentions(part, kind) for part in section)


def _find(section: object, name: str) -> object:
    """Return the first value under `name` at any depth of a section of tokenizer.json."""
    if isinstance(section, dict):
        if name in section:
            return section[name]
        section = list(section.values())
    if isinstance(section, list):
        return next((found for part in section if (found := _find(part, name))), None)
    return None


def _text(name: str, value: str) -> MetadataEntry:
    return MetadataEntry(name, GGUFValueType.STRING, str(value))


def _integer(name: str, value: int) -> MetadataEntry:
    return MetadataEntry(name, GGUFValueType.UINT32, value)


def _flag(name: str, value: bool) -> MetadataEntry:
    return MetadataEntry(name, GGUFValueType.BOOL, value)


def _array(
    name: str, value: list[str] | list[int] | list[float] | bytes, element_type: GGUFValueType
) -> MetadataEntry:
    return MetadataEntry(name, GGUFValueType.ARRAY, value, element_type)
