"""The tokenizer keys of a GGUF file, read once and checked: a foreign file may hold anything under them."""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property
from typing import Any

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.tokenizer_format import (
    BYTE_TOKEN,
    Metadata,
    TokenizerKey,
    TokenizerModel,
    TokenType,
    padding_name,
)
from powerinfer_toolkit.tokenizer_json import check_charsmap
from powerinfer_toolkit.tokenizer_pre import pre_tokenizer

_UNDEFINED = 0  # a type that gguf's enumeration has and nobody uses
_KNOWN_TYPES = frozenset((_UNDEFINED, *TokenType))
_HARMLESS_IDS = (TokenizerKey.PAD_ID,)  # files with a padding token that was never added exist
# llama.cpp's for SentencePiece; files of upstream's kind need not say.
_LLAMA_IDS = {TokenizerKey.UNK_ID: 0, TokenizerKey.BOS_ID: 1, TokenizerKey.EOS_ID: 2}
_TYPES_OF_IDS = {
    TokenizerKey.UNK_ID: TokenType.UNKNOWN,
    TokenizerKey.BOS_ID: TokenType.CONTROL,
    TokenizerKey.EOS_ID: TokenType.CONTROL,
}


class TokenizerValues:
    """What a file says about its tokenizer. Every property raises PiError, naming the key that is damaged."""

    def __init__(self, get: Metadata) -> None:
        """Read nothing yet; `get` returns the value of a key or None."""
        self._get = get

    @cached_property
    def embedded(self) -> str | None:
        """The tokenizer.json in the file, None in files that other tools wrote."""
        return self.text(Key.TOKENIZER_JSON)

    @cached_property
    def model(self) -> TokenizerModel:
        """The kind of tokenizer."""
        name = self.text(TokenizerKey.MODEL)
        supported = ", ".join(TokenizerModel)
        if name is None:
            raise PiError(f"the file has no {TokenizerKey.MODEL}", hint=f"supported: {supported}")
        try:
            return TokenizerModel(name)
        except ValueError:
            raise PiError(
                f"unsupported {TokenizerKey.MODEL} {name!r:.60}", hint=f"supported: {supported}"
            ) from None

    @cached_property
    def tokens(self) -> list[str]:
        """Token texts by id. All differ; an empty one, which no text holds, is named as padding."""
        found = self._array(TokenizerKey.TOKENS, str)
        if not found:
            raise PiError(
                f"the file has no {TokenizerKey.TOKENS}",
                hint="convert the model again, or take a complete GGUF file",
            )
        tokens = [token or padding_name(i) for i, token in enumerate(found)]
        if len(set(tokens)) != len(tokens):
            token, n_times = Counter(tokens).most_common(1)[0]
            raise damaged(TokenizerKey.TOKENS, f"it has the token {token!r:.60} {n_times} times")
        return tokens

    @cached_property
    def types(self) -> list[int]:
        """One TokenType per token; where the file has none, what names and special ids tell."""
        types = self._array(TokenizerKey.TOKEN_TYPE, int)
        if types is None:
            return self._types_by_name()
        if self.embedded is None and len(types) != len(self.tokens):
            raise _uneven(TokenizerKey.TOKEN_TYPE, len(types), len(self.tokens))
        strange = set(types) - _KNOWN_TYPES
        if strange:
            raise damaged(TokenizerKey.TOKEN_TYPE, f"{strange.pop()} is no type of a token")
        return types

    @cached_property
    def scores(self) -> list[float]:
        """One score per token (log-probability or rank), 0 throughout where the file has none."""
        scores = self._array(TokenizerKey.SCORES, float, int)
        if scores is None:
            console.warning(f"the file has no {TokenizerKey.SCORES}: words may be cut differently")
            return [0.0] * len(self.tokens)
        if len(scores) != len(self.tokens):
            raise _uneven(TokenizerKey.SCORES, len(scores), len(self.tokens))
        if any(map(math.isnan, scores)):
            raise damaged(TokenizerKey.SCORES, "it holds NaN")
        return scores

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens to join, best first."""
        found = self._array(TokenizerKey.MERGES, str)
        if found is None:
            raise PiError(
                f"the file has no {TokenizerKey.MERGES}",
                hint="convert the model again, or take a complete GGUF file",
            )
        known = set(self.tokens)
        merges = []
        for merge in found:
            left, _, right = merge.partition(" ")
            if left not in known or right not in known or left + right not in known:
                raise damaged(TokenizerKey.MERGES, f"{merge!r:.60} joins what are no tokens")
            merges.append((left, right))
        return merges

    @cached_property
    def charsmap(self) -> bytes:
        """SentencePiece's compiled normalisation, empty where there is none."""
        numbers = self._array(TokenizerKey.PRECOMPILED_CHARSMAP, int) or []
        table = bytes(number & 0xFF for number in numbers)  # some files have signed bytes
        if table:
            check_charsmap(table, TokenizerKey.PRECOMPILED_CHARSMAP)
        return table

    @property
    def adds_bos(self) -> bool:
        """Whether texts start with bos: the key, else what the kind of tokenizer does."""
        stated = self.flag(TokenizerKey.ADD_BOS)
        if stated is not None:
            return stated
        if self.model is TokenizerModel.BYTE_LEVEL_BPE:
            return pre_tokenizer(self.text(TokenizerKey.PRE) or "default").add_bos
        return self.model is TokenizerModel.SENTENCEPIECE_BPE

    @property
    def adds_eos(self) -> bool:
        """Whether texts end with eos: the key, else what the kind of tokenizer does."""
        stated = self.flag(TokenizerKey.ADD_EOS)
        return self.model is TokenizerModel.SENTENCEPIECE_UNIGRAM if stated is None else stated

    @property
    def adds_space_prefix(self) -> bool:
        """Whether texts start with a space that is not theirs: the key, else what SentencePiece does."""
        stated = self.flag(TokenizerKey.ADD_SPACE_PREFIX)
        return self.model is not TokenizerModel.BYTE_LEVEL_BPE if stated is None else stated

    def text(self, name: str) -> str | None:
        """Return the text under `name`, None where the file has none."""
        value = self._get(name)
        if value is not None and not isinstance(value, str):
            raise damaged(name, f"{value!r:.60} is no text")
        return value

    def flag(self, name: str) -> bool | None:
        """Return the truth value under `name`, None where the file has none."""
        value = self._get(name)
        if value is not None and value not in (0, 1):
            raise damaged(name, f"{value!r:.60} is no truth value")
        return None if value is None else bool(value)

    def token_id(self, name: str) -> int | None:
        """Return the id under `name`, None where there is no such token."""
        value = self._get(name)
        if value is None:
            return self._default_id(name)
        if type(value) is not int:
            raise damaged(name, f"{value!r:.60} is no token id")
        if not 0 <= value < self._n_tokens:
            if name in _HARMLESS_IDS:
                return None
            raise damaged(name, f"there are {self._n_tokens} tokens, so none has the id {value}")
        return value

    def _default_id(self, name: str) -> int | None:
        """Return what llama.cpp takes, in files that do not even say whether bos is added."""
        if self.model is not TokenizerModel.SENTENCEPIECE_BPE:
            return None
        default = _LLAMA_IDS.get(name) if self._get(TokenizerKey.ADD_BOS) is None else None
        return default if default is not None and default < self._n_tokens else None

    @property
    def _n_tokens(self) -> int:
        """The number of tokens, without their types: those may follow from ids."""
        types = self._get(TokenizerKey.TOKEN_TYPE) if self.embedded is not None else None
        return len(types) if isinstance(types, list) else len(self.tokens)

    def _types_by_name(self) -> list[int]:
        types = [int(TokenType.NORMAL)] * len(self.tokens)
        if self.model is not TokenizerModel.BYTE_LEVEL_BPE:
            for i, token in enumerate(self.tokens):
                if BYTE_TOKEN.fullmatch(token):
                    types[i] = TokenType.BYTE
        for name, kind in _TYPES_OF_IDS.items():
            special = self.token_id(name)
            if special is not None:
                types[special] = kind
        return types

    def _array(self, name: str, *kinds: type[Any]) -> list[Any] | None:
        """Return the array under `name` whose elements are of `kinds`, None where the file has none."""
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise damaged(name, f"{value!r:.60} is no array")
        found = set(map(type, value))
        if found - set(kinds):
            raise damaged(name, f"it is no array of {kinds[0].__name__}")
        return value


def damaged(name: str, what: str) -> PiError:
    """Return the failure of a key that holds what it cannot."""
    return PiError(
        f"{name} is damaged: {what}", hint="convert the model again, or download the file again"
    )


def _uneven(name: str, n_found: int, n_tokens: int) -> PiError:
    return damaged(name, f"it has {n_found} elements for {n_tokens} tokens")
