"""Builds `tokenizers.Tokenizer` objects from plain lists: byte-level BPE, SentencePiece BPE and unigram."""

from __future__ import annotations

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
from powerinfer_toolkit.tokenizer_format import SPACE, TokenizerModel, TokenType
from powerinfer_toolkit.tokenizer_pre import GPT2_REGEX, PreTokenizer

_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)
_UNREACHABLE_SCORE = -1e6  # far below any sum of log-probabilities over a token's length


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
    ids = {
        token: i
        for i, token in enumerate(vocabulary.tokens)
        if vocabulary.types[i] != TokenType.UNUSED
    }
    model = _bpe(ids, merges, ignore_merges=pre.ignore_merges)
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
    SentencePiece's do.
    """
    normal = {
        token: score
        for token, kind, score in zip(
            vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True
        )
        if kind == TokenType.NORMAL
    }
    ranked: list[tuple[float, str, int, str, str]] = []
    for token, score in normal.items():
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-score, token, -cut, left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _byte_level_cuts(pre: PreTokenizer, *, add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
    """Return the cuts, then bytes as characters; only ByteLevel's own regex comes after its prefix."""
    own = pre.regexes[-1] == GPT2_REGEX
    regexes = pre.regexes[:-1] if own else pre.regexes
    steps = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
    mapping = pre_tokenizers.ByteLevel(add_prefix_space=own and add_prefix_space, use_regex=own)
    return pre_tokenizers.Sequence([*steps, mapping])


def _bpe(ids: dict[str, int], merges: Sequence[tuple[str, str]], **options: object) -> models.BPE:
    try:
        return models.BPE(vocab=ids, merges=list(merges), **options)
    except Exception as failure:  # tokenizers raises bare Exception
        raise PiError(f"the tokenizer's merges do not fit its tokens: {failure}") from failure


def _sentencepiece_bpe(vocabulary: Vocabulary, *, ignore_merges: bool) -> models.BPE:
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    return _bpe(
        ids,
        merges_from_scores(vocabulary),
        unk_token=_unknown(vocabulary),
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in vocabulary.types,
        ignore_merges=ignore_merges,
    )


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
    """Return the cuts: isolated pieces stand alone, and names of special tokens are cut in two.

    A whole piece of text that is a token skips the merges where pieces are isolated; the names, as plain
    text, must not become the tokens in this way.
    """
    steps: list[pre_tokenizers.PreTokenizer] = []
    if rules.add_dummy_prefix and rules.prefix_first_only:
        steps.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False))
    if rules.isolated:
        longest_first = sorted(rules.isolated, key=len, reverse=True)
        patterns = [re.escape(piece) for piece in longest_first]
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
            if kind in _SPECIAL_TYPES and len(token) > 1:
                patterns.append(f"{re.escape(token[0])}(?={re.escape(token[1:])})")
        steps.append(pre_tokenizers.Split(Regex("|".join(patterns)), "isolated"))
    return pre_tokenizers.Sequence(steps) if steps else None


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
