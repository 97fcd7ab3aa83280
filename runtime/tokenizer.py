"""Text to token ids and back, without torch or transformers.

Bytes are the common ground: every token stands for some bytes, and text is their UTF-8 decoding. So decoding
a list and decoding a stream give the same text, whatever falls on token borders.
"""

from __future__ import annotations

import codecs
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Self

import tokenizers

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.tokenizer_format import (
    SPACE,
    Metadata,
    TokenizerKey,
    TokenizerModel,
    TokenType,
    required_list,
    token_types,
)
from powerinfer_toolkit.tokenizer_rebuild import adds_bos, tokenizer_from_keys, tokenizer_model

# Control tokens that end an answer in the chat formats of published models.
END_OF_GENERATION_NAMES = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|EOT|>",
    "<EOT>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's character for every byte: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_ALPHABET = _byte_level_alphabet()


class Tokenizer:
    """The tokenizer of one model file.

    `bos_id` and `eos_id` are None where the model has none; `eog_ids` are the tokens after which an answer
    is complete. Safe to use from several threads.
    """

    def __init__(self, backend: tokenizers.Tokenizer, get: Metadata) -> None:
        """Take the tokenizer itself and, from the file's metadata, what it says about special tokens."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._lock = threading.Lock()  # parse_special is a state of the backend
        self._byte_level = tokenizer_model(get) is TokenizerModel.BYTE_LEVEL_BPE
        self._types = _all_types(get)
        self.n_vocab = len(self._types)
        self.bos_id = self._special_id(get, TokenizerKey.BOS_ID)
        self.eos_id = self._special_id(get, TokenizerKey.EOS_ID)
        self.adds_bos = adds_bos(get) and self.bos_id is not None
        self.adds_eos = bool(get(TokenizerKey.ADD_EOS)) and self.eos_id is not None
        prefix = get(TokenizerKey.ADD_SPACE_PREFIX)
        self._drops_first_space = not self._byte_level and (prefix is None or bool(prefix))
        self.chat_template: str | None = get(TokenizerKey.CHAT_TEMPLATE)
        self.special_tokens = self._special_tokens(get)
        self.eog_ids = self._end_of_generation(get)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_metadata(cls, get: Metadata) -> Self:
        """Build the tokenizer of a file: the embedded tokenizer.json, else from the GGUF keys.

        `get` returns the value of a key or None. PiError where the file has no tokenizer or an
        unsupported one.
        """
        embedded = get(Key.TOKENIZER_JSON)
        if embedded is None:
            return cls(tokenizer_from_keys(get), get)
        try:
            backend = tokenizers.Tokenizer.from_str(embedded)
        except Exception as failure:  # tokenizers raises bare Exception
            raise PiError(
                f"the file's {Key.TOKENIZER_JSON} cannot be read: {failure}",
                hint="convert the model again",
            ) from failure
        return cls(backend, get)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of `text`.

        `add_special` puts bos and eos around it where the model is used so; `parse_special` turns the
        texts of special tokens into those tokens, else they are plain text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as failure:
            raise PiError("the text is not valid UTF-8", hint="check its encoding") from failure
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if add_special and self.adds_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if add_special and self.adds_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids` taken from the beginning; bytes that are no UTF-8 become U+FFFD."""
        stream = self.decoder(starts_text=True, skip_special=skip_special)
        return "".join([*(stream.feed(token_id) for token_id in ids), stream.finish()])

    def decoder(self, *, starts_text: bool = False, skip_special: bool = True) -> TextStream:
        """Return a decoder for tokens that come one by one.

        `starts_text`: the first token begins a text, so that SentencePiece's dummy space is dropped, else
        the tokens continue one.
        """
        return TextStream(
            self, drop_space=starts_text and self._drops_first_space, skip_special=skip_special
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text; PiError for an id outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is a control or unknown token, which text output leaves out."""
        return self._types[self._checked(token_id)] in _SPECIAL_TYPES

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text, None where there is none."""
        return self._backend.token_to_id(text)

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(self._checked(token_id)) or ""
        kind = self._types[token_id]
        if kind in (*_SPECIAL_TYPES, TokenType.USER_DEFINED):
            return (token if self._byte_level else token.replace(SPACE, " ")).encode("utf-8")
        if kind == TokenType.BYTE and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if not self._byte_level:
            return token.replace(SPACE, " ").encode("utf-8")
        known = all(character in _ALPHABET for character in token)
        return bytes(_ALPHABET[character] for character in token) if known else token.encode()

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.n_vocab:
            raise PiError(f"token id {token_id} is outside the vocabulary of {self.n_vocab}")
        return token_id

    def _special_id(self, get: Metadata, key: str) -> int | None:
        token_id = get(key)
        return token_id if isinstance(token_id, int) and 0 <= token_id < self.n_vocab else None

    def _special_tokens(self, get: Metadata) -> dict[str, str]:
        """Return the texts that chat templates know as bos_token, eos_token, unk_token and pad_token."""
        keys = {
            "bos_token": TokenizerKey.BOS_ID,
            "eos_token": TokenizerKey.EOS_ID,
            "unk_token": TokenizerKey.UNK_ID,
            "pad_token": TokenizerKey.PAD_ID,
        }
        ids = {name: self._special_id(get, key) for name, key in keys.items()}
        texts = {name: self._backend.id_to_token(i) for name, i in ids.items() if i is not None}
        return {name: text for name, text in texts.items() if text is not None}

    def _end_of_generation(self, get: Metadata) -> frozenset[int]:
        ids = {self.eos_id, self._special_id(get, TokenizerKey.EOT_ID)}
        for name in END_OF_GENERATION_NAMES:
            token_id = self.token_id(name)
            if token_id is not None and token_id < self.n_vocab:
                marked = self._types[token_id] in (TokenType.CONTROL, TokenType.USER_DEFINED)
                ids.add(token_id if marked else None)
        return frozenset(token_id for token_id in ids if token_id is not None)


class TextStream:
    """Turns tokens into text as they come: each piece is whole characters, together they are the text."""

    def __init__(self, tokenizer: Tokenizer, *, drop_space: bool, skip_special: bool) -> None:
        """Use Tokenizer.decoder; `drop_space` drops one space at the very beginning."""
        self._tokenizer = tokenizer
        self._drop_space = drop_space
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """Return the characters that this token completes, "" while one is still incomplete."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Return U+FFFD for a character that was never completed, else ""; the stream is then empty."""
        return self._utf8.decode(b"", final=True)


def _all_types(get: Metadata) -> Sequence[int]:
    types = get(TokenizerKey.TOKEN_TYPE)
    return types if types else token_types(get, len(required_list(get, TokenizerKey.TOKENS)))
