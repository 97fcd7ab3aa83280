"""Rebuilds a tokenizer from the GGUF keys of files that other tools wrote."""

from __future__ import annotations

from tokenizers import Tokenizer

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.tokenizer_build import (
    SentencePieceRules,
    Vocabulary,
    byte_level_tokenizer,
    frame_with,
    sentencepiece_tokenizer,
)
from powerinfer_toolkit.tokenizer_format import (
    Metadata,
    TokenizerKey,
    TokenizerModel,
    TokenType,
    required_list,
    token_types,
)
from powerinfer_toolkit.tokenizer_pre import pre_tokenizer


def tokenizer_from_keys(get: Metadata) -> Tokenizer:
    """Return the tokenizer that the `tokenizer.ggml` keys describe; PiError where they do not suffice.

    Encoding with special tokens frames a text with bos and eos as the keys say.
    """
    model = tokenizer_model(get)
    if model is TokenizerModel.BYTE_LEVEL_BPE:
        tokenizer = _byte_level(get)
    else:
        tokenizer = _sentencepiece(get, model)
    tokens = required_list(get, TokenizerKey.TOKENS)
    bos, eos = adds_bos(get), bool(get(TokenizerKey.ADD_EOS))
    frame_with(
        tokenizer,
        _named(tokens, get(TokenizerKey.BOS_ID)) if bos else None,
        _named(tokens, get(TokenizerKey.EOS_ID)) if eos else None,
    )
    return tokenizer


def tokenizer_model(get: Metadata) -> TokenizerModel:
    """Return the kind of tokenizer in the file; PiError names the supported ones."""
    name = get(TokenizerKey.MODEL)
    supported = ", ".join(TokenizerModel)
    if name is None:
        raise PiError(f"the file has no {TokenizerKey.MODEL}", hint=f"supported: {supported}")
    try:
        return TokenizerModel(name)
    except ValueError as failure:
        raise PiError(
            f"unsupported tokenizer model {name!r}", hint=f"supported: {supported}"
        ) from failure


def adds_bos(get: Metadata) -> bool:
    """Return whether texts start with bos: the key, else what the kind of tokenizer does."""
    stated = get(TokenizerKey.ADD_BOS)
    if stated is not None:
        return bool(stated)
    model = tokenizer_model(get)
    if model is TokenizerModel.BYTE_LEVEL_BPE:
        return pre_tokenizer(get(TokenizerKey.PRE) or "default").add_bos
    return model is TokenizerModel.SENTENCEPIECE_BPE


def _byte_level(get: Metadata) -> Tokenizer:
    name = get(TokenizerKey.PRE)
    if name is None:
        console.warning(f"the file has no {TokenizerKey.PRE}: words may be cut differently")
    tokens = required_list(get, TokenizerKey.TOKENS)
    merges = []
    for merge in required_list(get, TokenizerKey.MERGES):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    return byte_level_tokenizer(
        Vocabulary(tokens, token_types(get, len(tokens))),
        merges,
        pre_tokenizer(name or "default"),
        add_prefix_space=bool(get(TokenizerKey.ADD_SPACE_PREFIX)),
    )


def _sentencepiece(get: Metadata, model: TokenizerModel) -> Tokenizer:
    tokens = required_list(get, TokenizerKey.TOKENS)
    scores = get(TokenizerKey.SCORES) or [0.0] * len(tokens)  # optional in upstream's files
    if len(scores) != len(tokens):
        raise PiError(f"{len(scores)} token scores for {len(tokens)} tokens")
    prefix = get(TokenizerKey.ADD_SPACE_PREFIX)
    rules = SentencePieceRules(
        model,
        add_dummy_prefix=prefix is None or bool(prefix),
        remove_extra_whitespaces=bool(get(TokenizerKey.REMOVE_EXTRA_WHITESPACES)),
        charsmap=bytes(get(TokenizerKey.PRECOMPILED_CHARSMAP) or []),
    )
    types = list(token_types(get, len(tokens)))
    unknown = get(TokenizerKey.UNK_ID)
    if unknown is not None and unknown < len(types) and TokenType.UNKNOWN not in types:
        types[unknown] = TokenType.UNKNOWN
    return sentencepiece_tokenizer(Vocabulary(tokens, types, scores), rules)


def _named(tokens: list[str], token_id: int | None) -> tuple[str, int] | None:
    if token_id is None or not 0 <= token_id < len(tokens):
        return None
    return tokens[token_id], token_id
