"""Text to token ids and back, without torch or transformers.

Bytes are the common ground: every token stands for some bytes, and text is their UTF-8 decoding. So decoding
a list and decoding a stream give the same text, whatever falls on token borders.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Iterable
from typing import Self

import tokenizers

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.tokenizer_format import (
    BYTE_TOKEN,
    SPACE,
    Metadata,
    TokenizerKey,
    TokenizerModel,
    TokenType,
)
from powerinfer_toolkit.tokenizer_json import library_failures, load_tokenizer_json
from powerinfer_toolkit.tokenizer_rebuild import tokenizer_from_keys
from powerinfer_toolkit.tokenizer_values import TokenizerValues

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

    def __init__(self, backend: tokenizers.Tokenizer, values: TokenizerValues) -> None:
        """Take the tokenizer itself and what the file's keys say about special tokens."""
        self._backend = backend
        self._lock = threading.Lock()  # parse_special is a state of the backend
        self._byte_level = values.model is TokenizerModel.BYTE_LEVEL_BPE
        self._types = values.types
        self.n_vocab = len(self._types)
        self.bos_id = values.token_id(TokenizerKey.BOS_ID)
        self.eos_id = values.token_id(TokenizerKey.EOS_ID)
        self.adds_bos = values.adds_bos and self.bos_id is not None
        self.adds_eos = values.adds_eos and self.eos_id is not None
        self._drops_first_space = not self._byte_level and values.adds_space_prefix
        self.chat_template = values.text(TokenizerKey.CHAT_TEMPLATE)
        self.special_tokens = self._special_tokens(values)
        self.eog_ids = self._end_of_generation(values)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_metadata(cls, get: Metadata, n_rows: int | None = None) -> Self:
        """Build the tokenizer of a file: the embedded tokenizer.json, else from the GGUF keys.

        `get` returns the value of a key or None; `n_rows` is the number of embedding rows, where there are
        any. PiError, which names the key, where the file has no tokenizer, a damaged or an unsupported one.
        """
        values = TokenizerValues(get)
        if n_rows is not None and len(values.types) != n_rows:
            raise PiError(
                f"{TokenizerKey.TOKENS}: {len(values.types)} tokens for {n_rows} embedding rows",
                hint="the file is damaged: convert or download it again",
            )
        if values.embedded is None:
            return cls(tokenizer_from_keys(values), values)
        return cls(load_tokenizer_json(values.embedded, Key.TOKENIZER_JSON), values)

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the token ids of `text`.

        `add_special` puts bos and eos around it where the model is used so; `parse_special` turns the
        texts of special tokens into those tokens, else they are plain text. PiError where the text is not
        Unicode, or the file's tokenizer cannot encode it.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as failure:
            raise PiError("the text is not valid UTF-8", hint="check its encoding") from failure
        with self._lock, library_failures("the file's tokenizer cannot encode the text"):
            self._backend.encode_special_tokens = not parse_special
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if ids and max(ids) >= self.n_vocab:
            raise PiError(
                f"the tokenizer gives the id {max(ids)}, but there are {self.n_vocab} tokens",
                hint=f"the file's {Key.TOKENIZER_JSON} is of another model: convert it again",
            )
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
        if kind == TokenType.BYTE and BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if not self._byte_level:
            return token.replace(SPACE, " ").encode("utf-8")
        known = all(character in _ALPHABET for character in token)
        return bytes(_ALPHABET[character] for character in token) if known else token.encode()

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.n_vocab:
            raise PiError(
                f"token id {token_id} is outside the vocabulary of {self.n_vocab}",
                hint="token ids are those of this file's own tokenizer",
            )
        return token_id

    def _special_tokens(self, values: TokenizerValues) -> dict[str, str]:
        """Return the texts that chat templates know as bos_token, eos_token, unk_token and pad_token."""
        keys = {
            "bos_token": TokenizerKey.BOS_ID,
            "eos_token": TokenizerKey.EOS_ID,
            "unk_token": TokenizerKey.UNK_ID,
            "pad_token": TokenizerKey.PAD_ID,
        }
        ids = {name: values.token_id(key) for name, key in keys.items()}
        texts = {name: self._backend.id_to_token(i) for name, i in ids.items() if i is not None}
        return {name: text for name, text in texts.items() if text is not None}

    def _end_of_generation(self, values: TokenizerValues) -> frozenset[int]:
        ids = {self.eos_id, values.token_id(TokenizerKey.EOT_ID)}
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
