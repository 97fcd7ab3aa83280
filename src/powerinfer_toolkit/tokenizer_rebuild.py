"""Rebuilds a tokenizer from the GGUF keys of files that other tools wrote."""

from __future__ import annotations

from tokenizers import Tokenizer

from powerinfer_toolkit import console
from powerinfer_toolkit.tokenizer_build import (
    SentencePieceRules,
    Vocabulary,
    byte_level_tokenizer,
    frame_with,
    is_spaces,
    sentencepiece_tokenizer,
)
from powerinfer_toolkit.tokenizer_format import SPACE, TokenizerKey, TokenizerModel, TokenType
from powerinfer_toolkit.tokenizer_json import library_failures
from powerinfer_toolkit.tokenizer_pre import pre_tokenizer
from powerinfer_toolkit.tokenizer_values import TokenizerValues, damaged

_N_BYTES = 256


def tokenizer_from_keys(values: TokenizerValues) -> Tokenizer:
    """Return the tokenizer that the `tokenizer.ggml` keys describe; PiError where they do not suffice.

    Encoding with special tokens frames a text with bos and eos as the keys say.
    """
    with library_failures("the tokenizer.ggml keys make no tokenizer"):
        if values.model is TokenizerModel.BYTE_LEVEL_BPE:
            tokenizer = _byte_level(values)
        else:
            tokenizer = _sentencepiece(values)
        frame_with(
            tokenizer,
            _named(values, TokenizerKey.BOS_ID) if values.adds_bos else None,
            _named(values, TokenizerKey.EOS_ID) if values.adds_eos else None,
        )
    return tokenizer


def _byte_level(values: TokenizerValues) -> Tokenizer:
    name = values.text(TokenizerKey.PRE)
    if name is None:
        console.warning(f"the file has no {TokenizerKey.PRE}: words may be cut differently")
    return byte_level_tokenizer(
        Vocabulary(values.tokens, values.types),
        values.merges,
        pre_tokenizer(name or "default"),
        add_prefix_space=values.adds_space_prefix,
    )


def _sentencepiece(values: TokenizerValues) -> Tokenizer:
    rules = SentencePieceRules(
        values.model,
        add_dummy_prefix=values.adds_space_prefix,
        remove_extra_whitespaces=bool(values.flag(TokenizerKey.REMOVE_EXTRA_WHITESPACES)),
        charsmap=values.charsmap,
    )
    types = _sentencepiece_types(values)
    tokens = [
        token.replace(" ", SPACE) if kind == TokenType.USER_DEFINED and is_spaces(token) else token
        for token, kind in zip(values.tokens, types, strict=True)
    ]
    return sentencepiece_tokenizer(Vocabulary(tokens, types, values.scores), rules)


def _sentencepiece_types(values: TokenizerValues) -> list[int]:
    types = list(values.types)
    unknown = values.token_id(TokenizerKey.UNK_ID)
    if unknown is not None and TokenType.UNKNOWN not in types:
        types[unknown] = TokenType.UNKNOWN
    if TokenType.UNKNOWN not in types and types.count(TokenType.BYTE) < _N_BYTES:
        raise damaged(
            TokenizerKey.TOKEN_TYPE, "without an unknown token and bytes, characters would be lost"
        )
    return types


def _named(values: TokenizerValues, key: str) -> tuple[str, int] | None:
    token_id = values.token_id(key)
    return None if token_id is None else (values.tokens[token_id], token_id)
