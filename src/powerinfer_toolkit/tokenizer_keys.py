"""From the tokenizer files of a Hugging Face checkpoint to GGUF keys."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFValueType
from tokenizers import Tokenizer

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.sentencepiece_model import SentencePieceModel
from powerinfer_toolkit.tokenizer_files import TokenizerFiles, read_tokenizer_files, token_text
from powerinfer_toolkit.tokenizer_format import SPACE, TokenizerKey, TokenizerModel, TokenType
from powerinfer_toolkit.tokenizer_pre import recognise

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


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


def tokenizer_metadata(model_dir: Path, n_vocab: int) -> TokenizerKeys:
    """Return the GGUF keys for the tokenizer in `model_dir` of a model with `n_vocab` embedding rows.

    Missing rows become unused tokens `[PAD{id}]`, llama.cpp's convention. PiError where there is no
    tokenizer, its kind is not supported or it has more tokens than the model has rows.
    """
    files = read_tokenizer_files(model_dir)
    text = json.dumps(files.spec, ensure_ascii=False, separators=(",", ":"))
    tokenizer = _load(text, model_dir)
    model = _model_kind(files.spec, model_dir)
    pre = _pre_name(files.spec, model)
    present = _tokens_by_id(files.spec)
    n_tokens = max(present, default=-1) + 1
    if n_tokens > n_vocab:
        raise PiError(
            f"the tokenizer has {n_tokens} tokens, the model only {n_vocab} embedding rows",
            hint="tokenizer and weights are of different checkpoints, or tokens were only added",
        )
    tokens = [present.get(token_id, f"[PAD{token_id}]") for token_id in range(n_vocab)]
    keys = [
        _text(TokenizerKey.MODEL, model),
        _text(TokenizerKey.PRE, pre),
        _array(TokenizerKey.TOKENS, tokens, GGUFValueType.STRING),
        _array(
            TokenizerKey.TOKEN_TYPE,
            _token_types(files, model, present, n_vocab),
            GGUFValueType.INT32,
        ),
        *_model_keys(files, model, tokenizer, tokens),
        *_special_ids(files, present),
        *_framing(files, tokenizer, model, present),
    ]
    if files.chat_template is not None:
        keys.append(_text(TokenizerKey.CHAT_TEMPLATE, files.chat_template))
    keys.append(_text(Key.TOKENIZER_JSON, text))
    return TokenizerKeys(model, pre, n_tokens, keys)


def _load(text: str, model_dir: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as failure:  # tokenizers raises bare Exception
        raise PiError(
            f"{model_dir / 'tokenizer.json'} cannot be read: {failure}",
            hint="a newer `tokenizers` package may know it",
        ) from failure


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


def _mentions(section: object, kind: str) -> bool:
    """Return whether a section of tokenizer.json has a step of type `kind` at any depth."""
    if isinstance(section, dict):
        return section.get("type") == kind or any(_mentions(v, kind) for v in section.values())
    return isinstance(section, list) and any(_mentions(part, kind) for part in section)


def _pre_name(spec: dict[str, Any], model: TokenizerModel) -> str:
    if model is not TokenizerModel.BYTE_LEVEL_BPE:
        return "default"
    name = recognise(
        spec["pre_tokenizer"],
        ignore_merges=bool(spec["model"].get("ignore_merges")),
        nfc=_mentions(spec.get("normalizer"), "NFC"),
    )
    if name is None:
        console.warning(
            "unknown pre_tokenizer in tokenizer.json: other engines will cut words as 'default' does"
        )
    return name or "default"


def _tokens_by_id(spec: dict[str, Any]) -> dict[int, str]:
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, list):
        present = {token_id: piece for token_id, (piece, _) in enumerate(vocabulary)}
    else:
        present = {token_id: token for token, token_id in vocabulary.items()}
    present.update((added["id"], added["content"]) for added in spec.get("added_tokens") or [])
    return present


def _token_types(
    files: TokenizerFiles, model: TokenizerModel, present: dict[int, str], n_vocab: int
) -> list[int]:
    """Return a TokenType per row: SentencePiece's own where it is known, then the added tokens'."""
    types = [int(TokenType.UNUSED)] * n_vocab
    for token_id, token in present.items():
        is_byte = model is not TokenizerModel.BYTE_LEVEL_BPE and _BYTE_TOKEN.fullmatch(token)
        types[token_id] = TokenType.BYTE if is_byte else TokenType.NORMAL
    pieces = _pieces(files, present)
    if pieces is not None:
        types[: len(pieces.types)] = pieces.types
    for added in files.spec.get("added_tokens") or []:
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    unknown = _unknown_id(files.spec["model"])
    if unknown is not None and model is not TokenizerModel.BYTE_LEVEL_BPE:
        types[unknown] = TokenType.UNKNOWN
    return [int(kind) for kind in types]


def _pieces(files: TokenizerFiles, present: dict[int, str]) -> SentencePieceModel | None:
    """Return tokenizer.model where it says the same as tokenizer.json, added tokens aside."""
    pieces = files.sentencepiece
    if pieces is None:
        return None
    added = {token["id"] for token in files.spec.get("added_tokens") or []}
    agree = all(i in added or present.get(i) == piece for i, piece in enumerate(pieces.pieces))
    return pieces if agree else None


def _unknown_id(model: dict[str, Any]) -> int | None:
    if isinstance(model["vocab"], list):
        unknown = model.get("unk_id")
    else:
        unknown = model["vocab"].get(model.get("unk_token"))
    return unknown if isinstance(unknown, int) else None


def _model_keys(
    files: TokenizerFiles, model: TokenizerModel, tokenizer: Tokenizer, tokens: list[str]
) -> list[MetadataEntry]:
    """Return merges for byte-level BPE; scores and the normaliser's rules for SentencePiece."""
    section = files.spec["model"]
    if model is TokenizerModel.BYTE_LEVEL_BPE:
        merges = [" ".join(pair) for pair in _merge_pairs(section)]
        return [_array(TokenizerKey.MERGES, merges, GGUFValueType.STRING)] if merges else []
    keys = [_array(TokenizerKey.SCORES, _scores(files, section, tokens), GGUFValueType.FLOAT32)]
    normaliser = tokenizer.normalizer
    if normaliser is not None and normaliser.normalize_str("a  b").count(SPACE) == 1:
        keys.append(MetadataEntry(TokenizerKey.REMOVE_EXTRA_WHITESPACES, GGUFValueType.BOOL, True))
    charsmap = _find(files.spec.get("normalizer"), "precompiled_charsmap")
    if isinstance(charsmap, str) and charsmap:
        table = base64.b64decode(charsmap)
        keys.append(_array(TokenizerKey.PRECOMPILED_CHARSMAP, table, GGUFValueType.UINT8))
    return keys


def _merge_pairs(section: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the merges, which older files write as one text with a space between."""
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in section["merges"])
    return [(left, right) for left, right in pairs]


def _scores(files: TokenizerFiles, section: dict[str, Any], tokens: list[str]) -> list[float]:
    """Return SentencePiece's score per row: the unigram's, tokenizer.model's or -rank of the merge.

    Rows that no model knows get the lowest score of all.
    """
    pieces = _pieces(files, dict(enumerate(tokens)))
    if isinstance(section["vocab"], list):
        scores = [float(score) for _, score in section["vocab"]]
    elif pieces is not None:
        scores = list(pieces.scores)
    else:
        rank: dict[str, int] = {}
        for left, right in _merge_pairs(section):
            rank.setdefault(left + right, len(rank))
        scores = [-float(rank.get(token, len(rank))) for token in tokens]
    lowest = min(scores, default=0.0)
    return scores + [lowest] * (len(tokens) - len(scores))


def _special_ids(files: TokenizerFiles, present: dict[int, str]) -> list[MetadataEntry]:
    ids = {token: token_id for token_id, token in present.items()}
    roles = {
        "bos": TokenizerKey.BOS_ID,
        "eos": TokenizerKey.EOS_ID,
        "unk": TokenizerKey.UNK_ID,
        "pad": TokenizerKey.PAD_ID,
    }
    found = {role: special_id(files, role, ids) for role in roles}
    keys = [_integer(roles[role], value) for role, value in found.items() if value is not None]
    ends = files.generation_config.get("eos_token_id")
    for token_id in ends if isinstance(ends, list) else []:
        if token_id in present and token_id != found["eos"]:
            return [*keys, _integer(TokenizerKey.EOT_ID, token_id)]
    return keys


def special_id(files: TokenizerFiles, role: str, ids: dict[str, int]) -> int | None:
    """Return the id of the "bos", "eos", "unk" or "pad" token, by name before by number."""
    for named in (files.config, files.special_tokens_map):
        text = token_text(named.get(f"{role}_token"))
        if text in ids:
            return ids[text]
    if files.sentencepiece is not None:
        numbered = getattr(files.sentencepiece, f"{role}_id")
    else:
        numbered = files.model_config.get(f"{role}_token_id")
    if isinstance(numbered, list):
        numbered = numbered[0] if numbered else None
    return numbered if numbered in ids.values() else None


def _framing(
    files: TokenizerFiles, tokenizer: Tokenizer, model: TokenizerModel, present: dict[int, str]
) -> list[MetadataEntry]:
    """Return what is put before and after a text, seen by encoding one."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    plain = tokenizer.encode("a", add_special_tokens=False)
    framed = tokenizer.encode("a").ids
    n = len(plain.ids)
    start = next((i for i in range(len(framed)) if framed[i : i + n] == plain.ids), 0)
    frame = (framed[:start], framed[start + n :])
    ids = {token: token_id for token_id, token in present.items()}
    keys = []
    for key, role, tokens in zip(
        (TokenizerKey.ADD_BOS, TokenizerKey.ADD_EOS), ("bos", "eos"), frame, strict=True
    ):
        token_id = special_id(files, role, ids)
        if tokens and tokens != [token_id]:
            console.warning(f"the tokenizer adds tokens {tokens} that GGUF cannot express")
        stated = files.config.get(f"add_{role}_token")
        adds = bool(tokens) if stated is None else bool(stated)
        keys.append(MetadataEntry(key, GGUFValueType.BOOL, adds and token_id is not None))
    space = "\u0120" if model is TokenizerModel.BYTE_LEVEL_BPE else SPACE
    prefixed = bool(plain.tokens) and plain.tokens[0].startswith(space)
    return [*keys, MetadataEntry(TokenizerKey.ADD_SPACE_PREFIX, GGUFValueType.BOOL, prefixed)]


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


def _array(
    name: str, value: list[str] | list[int] | list[float] | bytes, element_type: GGUFValueType
) -> MetadataEntry:
    return MetadataEntry(name, GGUFValueType.ARRAY, value, element_type)
