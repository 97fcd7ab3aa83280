"""Builds `tokenizers.Tokenizer` objects from plain lists: byte-level BPE, SentencePiece BPE and unigram."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.tokenizer_format import SPACE, TokenizerKey, TokenizerModel, TokenType
from powerinfer_toolkit.tokenizer_pre import (
    DIGIT,
    DIGITS,
    GPT2_REGEX,
    PUNCTUATION,
    PreTokenizer,
)

_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)
_UNREACHABLE_SCORE = -1e6  # far below any sum of log-probabilities over a token's length
_MAX_CUT_CHARACTERS = 1 << 28  # Gemma's 262,144 pieces have 2e7


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id with their TokenType; `scores` only for SentencePiece (log-probability or rank)."""

    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] = ()


@dataclass(frozen=True)
class SentencePieceRules:
    """What SentencePiece does besides its model.

    `prefix_first_only`: the dummy prefix goes before the text only, not after every special token.
    `isolated`: pieces that always stay whole (SentencePiece's user-defined symbols).
    """

    model: TokenizerModel
    add_dummy_prefix: bool = True
    prefix_first_only: bool = False
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""
    isolated: tuple[str, ...] = ()


def byte_level_tokenizer(
    vocabulary: Vocabulary,
    merges: Sequence[tuple[str, str]],
    pre: PreTokenizer,
    *,
    add_prefix_space: bool = False,
) -> Tokenizer:
    """Return a byte-level BPE tokenizer (GPT-2's); unused tokens cannot come out of it."""
    model = models.BPE(_used_ids(vocabulary), list(merges), ignore_merges=pre.ignore_merges)
    tokenizer = Tokenizer(model)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _byte_level_cuts(pre, add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, vocabulary)
    return tokenizer


def sentencepiece_tokenizer(vocabulary: Vocabulary, rules: SentencePieceRules) -> Tokenizer:
    """Return a tokenizer that encodes as SentencePiece does (github.com/google/sentencepiece).

    Control pieces are special tokens, user-defined ones added tokens unless `rules.isolated` has them.
    """
    if rules.model is TokenizerModel.SENTENCEPIECE_UNIGRAM:
        tokenizer = Tokenizer(_unigram(vocabulary))
    else:
        tokenizer = Tokenizer(_sentencepiece_bpe(vocabulary, ignore_merges=bool(rules.isolated)))
    tokenizer.normalizer = _sentencepiece_normaliser(rules)
    tokenizer.pre_tokenizer = _sentencepiece_cuts(rules, vocabulary)
    after = [decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    _add_tokens(tokenizer, vocabulary, skip=frozenset(rules.isolated))
    return tokenizer


def frame_with(
    tokenizer: Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None
) -> None:
    """Make `add_special_tokens` put `bos` before and `eos` after a text; both are (token, id)."""
    if bos is None and eos is None:
        return
    first, last = [bos[0]] if bos else [], [eos[0]] if eos else []
    pair = [*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*pair, *(f"{token}:1" for token in last)],
        special_tokens=[token for token in {bos, eos} if token],
    )


def merges_from_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return BPE merges, best first, for pieces that SentencePiece merges by falling score.

    SentencePiece joins the neighbours whose union has the highest score, leftmost first. Of the ways to
    build one piece those with the longer left part come first: runs of one character then split as
    SentencePiece's do. Equal scores are ranked as transformers' converters rank them. User-defined runs of
    spaces come before everything else. PiError for tokens so long that trying all their cuts would take
    minutes.
    """
    normal: dict[str, float] = {}
    for token, kind, score in zip(
        vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True
    ):
        if kind == TokenType.NORMAL:
            normal[token] = score
        elif kind == TokenType.USER_DEFINED and is_spaces(token):
            normal[token] = math.inf
    if sum(len(token) ** 2 for token in normal) > _MAX_CUT_CHARACTERS:
        raise PiError(
            f"{TokenizerKey.TOKENS}: its tokens are too long to be SentencePiece's",
            hint="the file is damaged: convert or download it again",
        )
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in normal.items():
        n = len(token)
        for cut in range(n - 1, 0, -1):
            if token[:cut] in normal and token[cut:] in normal:
                ranked.append((-score, -cut, cut - n, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def is_spaces(token: str) -> bool:
    """Return whether a token is a run of spaces, escaped or not."""
    return not token.strip(f" {SPACE}")


def _byte_level_cuts(pre: PreTokenizer, *, add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
    """Return the cuts, with bytes as characters in between; only ByteLevel's own regex has a prefix."""
    own = pre.regexes[-1] == GPT2_REGEX
    before = map(_cut, pre.regexes[:-1] if own else pre.regexes)
    mapping = pre_tokenizers.ByteLevel(add_prefix_space=own and add_prefix_space, use_regex=own)
    return pre_tokenizers.Sequence([*before, mapping, *map(_cut, pre.byte_regexes)])


def _cut(regex: str) -> pre_tokenizers.PreTokenizer:
    """Return the step that published tokenizers take: its tables of Unicode are not Oniguruma's."""
    if regex in (DIGIT, DIGITS):
        return pre_tokenizers.Digits(individual_digits=regex == DIGIT)
    if regex == PUNCTUATION:
        return pre_tokenizers.Punctuation("contiguous")
    return pre_tokenizers.Split(Regex(regex), "isolated")


def _sentencepiece_bpe(vocabulary: Vocabulary, *, ignore_merges: bool) -> models.BPE:
    return models.BPE(
        vocab=_used_ids(vocabulary),
        merges=merges_from_scores(vocabulary),
        unk_token=_unknown(vocabulary),
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in vocabulary.types,
        ignore_merges=ignore_merges,
    )


def _used_ids(vocabulary: Vocabulary) -> dict[str, int]:
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return {token: i for i, (token, kind) in enumerate(pairs) if kind != TokenType.UNUSED}


def _unknown(vocabulary: Vocabulary) -> str | None:
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind == TokenType.UNKNOWN:
            return token
    return None


def _unigram(vocabulary: Vocabulary) -> models.Unigram:
    """Return the model, in which text never becomes a control or byte piece by being spelt like one."""
    plain = (TokenType.NORMAL, TokenType.USER_DEFINED)
    scored = [
        (token, score if kind in plain else _UNREACHABLE_SCORE)
        for token, score, kind in zip(
            vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True
        )
    ]
    unknown = _unknown(vocabulary)
    return models.Unigram(
        vocab=scored,
        unk_id=None if unknown is None else list(vocabulary.tokens).index(unknown),
        byte_fallback=TokenType.BYTE in vocabulary.types,
    )


def _sentencepiece_normaliser(rules: SentencePieceRules) -> normalizers.Normalizer:
    """Return SentencePiece's steps in its order: map characters, trim spaces, prefix, escape spaces."""
    steps: list[normalizers.Normalizer] = []
    if rules.charsmap:
        steps.append(normalizers.Precompiled(rules.charsmap))
    if rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if rules.add_dummy_prefix and not rules.prefix_first_only:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _sentencepiece_cuts(
    rules: SentencePieceRules, vocabulary: Vocabulary
) -> pre_tokenizers.PreTokenizer | None:
    """Return the cuts: the dummy prefix of the first word, and isolated pieces that stand alone."""
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rules.add_dummy_prefix and rules.prefix_first_only:
        steps.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False))
    if rules.isolated:
        regex = _isolation(rules.isolated, vocabulary)
        steps.append(pre_tokenizers.Split(Regex(regex), "isolated"))
    return pre_tokenizers.Sequence(steps) if steps else None


def _isolation(isolated: Sequence[str], vocabulary: Vocabulary) -> str:
    """Return a regex of the isolated pieces, and of the first letter of a special name that stands alone.

    A whole piece of text that is a token skips the merges where pieces are isolated; the names of control
    and byte tokens must not become those tokens in this way.
    """
    names = ["0x[0-9A-F]{2}>"] if TokenType.BYTE in vocabulary.types else []
    firsts = {"<"} if names else set()
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in _SPECIAL_TYPES and len(token) > 1:
            firsts.add(token[0])
            names.append(re.escape(token[1:]))
    pieces = "|".join(re.escape(piece) for piece in sorted(isolated, key=len, reverse=True))
    initials = "|".join(re.escape(first) for first in sorted(firsts))
    # \G is where the last match ended, or the text begins
    alone = rf"\G(?:{initials})(?=(?:{'|'.join(names)})(?:\z|{pieces}))"
    return f"{pieces}|{alone}" if names else pieces


def _add_tokens(
    tokenizer: Tokenizer, vocabulary: Vocabulary, *, skip: frozenset[str] = frozenset()
) -> None:
    """Make control tokens special and user-defined ones added; both are found in the raw text."""
    special, plain = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in _SPECIAL_TYPES:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED and token not in skip:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
