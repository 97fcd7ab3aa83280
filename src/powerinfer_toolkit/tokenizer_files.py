"""The tokenizer files of a Hugging Face checkpoint: which there are, and what they say together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.sentencepiece_model import BPE, SentencePieceModel, read_sentencepiece
from powerinfer_toolkit.tokenizer_build import (
    SentencePieceRules,
    Vocabulary,
    byte_level_tokenizer,
    frame_with,
    sentencepiece_tokenizer,
)
from powerinfer_toolkit.tokenizer_format import TokenizerModel, TokenType, padding_name
from powerinfer_toolkit.tokenizer_json import check_charsmap, library_failures
from powerinfer_toolkit.tokenizer_pre import pre_tokenizer

TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
# How the classes of tokenizer_config.json cut words, which vocab.json and merges.txt do not say.
_CUTS = {
    None: "gpt-2",
    "GPT2Tokenizer": "gpt-2",
    "GPT2TokenizerFast": "gpt-2",
    "Qwen2Tokenizer": "qwen2",
    "Qwen2TokenizerFast": "qwen2",
}
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_TOKENS = 1 << 24
_CONFIGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "generation_config.json",
)
Json = dict[str, Any]


@dataclass(frozen=True)
class TokenizerFiles:
    """What a checkpoint directory holds: `spec` is tokenizer.json, read or built from tokenizer.model."""

    spec: Json
    config: Json  # tokenizer_config.json
    special_tokens_map: Json
    model_config: Json  # config.json
    generation_config: Json
    chat_template: str | None
    sentencepiece: SentencePieceModel | None


def read_tokenizer_files(model_dir: Path) -> TokenizerFiles:
    """Read the tokenizer files of `model_dir`; PiError where a file is missing or malformed."""
    with (
        malformed_files(model_dir),
        library_failures(f"{model_dir}: its tokenizer cannot be built"),
    ):
        return _read_files(model_dir)


@contextmanager
def malformed_files(model_dir: Path) -> Iterator[None]:
    """Turn into a PiError what reading JSON of another shape than expected raises."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as failure:
        what = f"{type(failure).__name__} {failure}"
        raise PiError(
            f"the tokenizer files in {model_dir} are malformed: {what:.200}",
            hint="download the checkpoint again, or see where it fails with --debug",
        ) from failure


def _read_files(model_dir: Path) -> TokenizerFiles:
    config, special, model_config, generation = (_read_json(model_dir / name) for name in _CONFIGS)
    json_path, pieces_path = model_dir / TOKENIZER_JSON, model_dir / SENTENCEPIECE
    pieces: SentencePieceModel | None = None
    if json_path.is_file():
        spec = _read_json(json_path)
        pieces = _scores_if_readable(pieces_path)
    elif pieces_path.is_file():
        pieces = read_sentencepiece(pieces_path)
        added = _added_tokens(config, special, _read_json(model_dir / "added_tokens.json"))
        spec = json.loads(_from_sentencepiece(pieces, config, added).to_str())
    elif (model_dir / VOCABULARY).is_file() and (model_dir / MERGES).is_file():
        added = _added_tokens(config, special, _read_json(model_dir / "added_tokens.json"))
        spec = json.loads(_from_merges(model_dir, config, special, added).to_str())
    else:
        names = f"{TOKENIZER_JSON}, {SENTENCEPIECE}, {VOCABULARY} with {MERGES}"
        raise PiError(
            f"no tokenizer in {model_dir}",
            hint=f"looked for {names}; download the checkpoint whole",
        )
    template = _chat_template(model_dir, config)
    return TokenizerFiles(spec, config, special, model_config, generation, template, pieces)


def _read_json(path: Path) -> Json:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as failure:
        raise PiError(f"{path} is not valid JSON: {failure}", hint="download it again") from failure
    if not isinstance(content, dict):
        raise PiError(f"{path} is not a JSON object", hint="download it again")
    return cast(Json, content)


def _scores_if_readable(path: Path) -> SentencePieceModel | None:
    """Return the model beside a tokenizer.json; there it only supplies scores and may be tiktoken's."""
    try:
        return read_sentencepiece(path) if path.is_file() else None
    except PiError:
        return None


def _chat_template(model_dir: Path, config: Json) -> str | None:
    """Return the default chat template, from its own file before tokenizer_config.json."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _added_tokens(config: Json, special_map: Json, added: Json) -> dict[int, AddedToken]:
    """Return added tokens by id: added_tokens_decoder, then added_tokens.json for ids it lacks."""
    special_texts = {token_text(value) for value in special_map.values()}
    extra = special_map.get("additional_special_tokens") or []
    special_texts.update(token_text(value) for value in extra)
    tokens = {
        int(token_id): AddedToken(text, special=text in special_texts, normalized=False)
        for text, token_id in added.items()
    }
    for token_id, entry in (config.get("added_tokens_decoder") or {}).items():
        flags = ("special", "lstrip", "rstrip", "single_word")
        options = {flag: bool(entry.get(flag, False)) for flag in flags}
        tokens[int(token_id)] = AddedToken(entry["content"], normalized=False, **options)
    if any(not 0 <= token_id < _MAX_TOKENS for token_id in tokens):
        raise PiError("the added tokens have ids that are none", hint="download the files again")
    return tokens


def token_text(value: object) -> str | None:
    """Return a special token written as text or as {"content": text}; None for anything else."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _from_merges(
    model_dir: Path, config: Json, special_map: Json, added: Mapping[int, AddedToken]
) -> Tokenizer:
    """Build the tokenizer of a checkpoint of GPT-2's kind, such as OPT's."""
    name = config.get("tokenizer_class")
    if name not in _CUTS:
        raise PiError(
            f"{model_dir}: {VOCABULARY} of a {name!r:.60} is not supported",
            hint=f"save {TOKENIZER_JSON} with transformers: AutoTokenizer...save_pretrained()",
        )
    named = {role: token_text(config.get(role) or special_map.get(role)) for role in _ROLES}
    vocabulary = _vocabulary(model_dir / VOCABULARY, added, frozenset(named.values()))
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    tokenizer = byte_level_tokenizer(
        vocabulary,
        _merges(model_dir / MERGES),
        pre_tokenizer(_CUTS[name]),
        add_prefix_space=bool(config.get("add_prefix_space")),
    )
    first, last = named["bos_token"], named["eos_token"]
    frame_with(
        tokenizer,
        (first, ids[first]) if config.get("add_bos_token") and first in ids else None,
        (last, ids[last]) if config.get("add_eos_token") and last in ids else None,
    )
    return tokenizer


def _vocabulary(
    path: Path, added: Mapping[int, AddedToken], special: frozenset[str | None]
) -> Vocabulary:
    """Return the tokens of vocab.json and the added ones; ids between them are unused."""
    found = _read_json(path)
    if any(type(i) is not int or not 0 <= i < _MAX_TOKENS for i in found.values()):
        raise PiError(f"{path} has ids that are none", hint="download it again")
    n_tokens = 1 + max([*found.values(), *added], default=-1)
    tokens = [padding_name(token_id) for token_id in range(n_tokens)]
    types = [int(TokenType.UNUSED)] * n_tokens
    for token, token_id in found.items():
        tokens[token_id] = token
        types[token_id] = TokenType.CONTROL if token in special else TokenType.NORMAL
    for token_id, entry in added.items():
        kind = TokenType.CONTROL if entry.special else TokenType.USER_DEFINED
        tokens[token_id], types[token_id] = entry.content, kind
    return Vocabulary(tokens, types)


def _merges(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if any(len(pair) != 2 for pair in pairs):
        raise PiError(f"{path} has lines that are no two tokens", hint="download it again")
    return [(left, right) for left, right in pairs]


def _from_sentencepiece(
    pieces: SentencePieceModel, config: Json, added: Mapping[int, AddedToken]
) -> Tokenizer:
    """Build the tokenizer of a checkpoint that has no tokenizer.json."""
    tokens, types, scores = list(pieces.pieces), list(pieces.types), list(pieces.scores)
    for token_id in range(len(tokens), max(added, default=-1) + 1):
        tokens.append(padding_name(token_id))
        types.append(TokenType.UNUSED)
        scores.append(min(scores))
    for token_id, token in added.items():
        tokens[token_id] = token.content
        if types[token_id] != TokenType.UNKNOWN:
            types[token_id] = TokenType.CONTROL if token.special else TokenType.USER_DEFINED
    own = range(len(pieces.pieces))
    isolated = [tokens[i] for i in own if types[i] == TokenType.USER_DEFINED and i not in added]
    is_bpe = pieces.model_type == BPE
    if pieces.charsmap:
        check_charsmap(pieces.charsmap, SENTENCEPIECE)
    rules = SentencePieceRules(
        TokenizerModel.SENTENCEPIECE_BPE if is_bpe else TokenizerModel.SENTENCEPIECE_UNIGRAM,
        add_dummy_prefix=bool(config.get("add_prefix_space", pieces.add_dummy_prefix)),
        prefix_first_only=config.get("legacy") is False,
        remove_extra_whitespaces=pieces.remove_extra_whitespaces,
        charsmap=pieces.charsmap,
        isolated=tuple(isolated),
    )
    tokenizer = sentencepiece_tokenizer(Vocabulary(tokens, types, scores), rules)
    tokenizer.add_tokens([token for token in added.values() if not token.special])
    tokenizer.add_special_tokens([token for token in added.values() if token.special])
    adds_bos, adds_eos = config.get("add_bos_token", is_bpe), config.get("add_eos_token", False)
    bos, eos = pieces.bos_id, pieces.eos_id
    frame_with(
        tokenizer,
        (tokens[bos], bos) if adds_bos and bos >= 0 else None,
        (tokens[eos], eos) if adds_eos and eos >= 0 else None,
    )
    return tokenizer
