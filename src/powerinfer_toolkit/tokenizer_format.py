"""What GGUF says about a tokenizer: key names, model names and token types (the GGUF specification's)."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum, StrEnum
from typing import Any

SPACE = "\u2581"  # SentencePiece writes a space as this character
BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")  # its names of bytes

Metadata = Callable[[str], Any]
"""Value of a GGUF key as str, int, float, bool or list of one of them; None where the key is absent."""


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TokenizerModel(StrEnum):
    """Values of `tokenizer.ggml.model` that this toolkit reads and writes."""

    BYTE_LEVEL_BPE = "gpt2"
    SENTENCEPIECE_BPE = "llama"
    SENTENCEPIECE_UNIGRAM = "t5"


class TokenizerKey:
    """Metadata keys of a tokenizer."""

    MODEL = "tokenizer.ggml.model"
    PRE = "tokenizer.ggml.pre"
    TOKENS = "tokenizer.ggml.tokens"
    SCORES = "tokenizer.ggml.scores"
    TOKEN_TYPE = "tokenizer.ggml.token_type"
    MERGES = "tokenizer.ggml.merges"
    BOS_ID = "tokenizer.ggml.bos_token_id"
    EOS_ID = "tokenizer.ggml.eos_token_id"
    EOT_ID = "tokenizer.ggml.eot_token_id"
    UNK_ID = "tokenizer.ggml.unknown_token_id"
    PAD_ID = "tokenizer.ggml.padding_token_id"
    ADD_BOS = "tokenizer.ggml.add_bos_token"
    ADD_EOS = "tokenizer.ggml.add_eos_token"
    ADD_SPACE_PREFIX = "tokenizer.ggml.add_space_prefix"
    REMOVE_EXTRA_WHITESPACES = "tokenizer.ggml.remove_extra_whitespaces"
    PRECOMPILED_CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
    CHAT_TEMPLATE = "tokenizer.chat_template"


def padding_name(token_id: int) -> str:
    """Return llama.cpp's name for an id that the tokenizer does not use."""
    return f"[PAD{token_id}]"
