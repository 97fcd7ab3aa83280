"""How byte-level BPE tokenizers cut text before merging: one table of GGUF names and regexes.

A row holds the regexes of the Hugging Face tokenizer in their order. Each cuts what the previous one left
into matches and gaps, so a `tokenizer.json` is recognised by bringing its `pre_tokenizer` section to the
same form: Digits and ByteLevel are regexes too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.tokenizer_format import TokenizerKey

GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
DIGIT, DIGITS = r"\p{N}", r"\p{N}+"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_CL100K = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_TAIL}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


def _cased(contraction: str, digits: str, tail: str = _CASED_TAIL, but: str = "") -> str:
    """Return the regex of o200k and Tekken: words end where lower case is followed by upper case."""
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}"
    capitals = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}"
    return f"{word}|{capitals}|{digits}|{tail}"


_O200K = _cased(_CONTRACTION + "?", r"\p{N}{1,3}")
_BLOOM = " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
)
_DEEPSEEK3 = rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_JAIS2_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
# Letters that have a case, as Unicode had them when DeepSeek LLM was trained.
_CASED_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """One way to cut text, and what tokenizers with this cut also do.

    `regexes` cut the text in order, `byte_regexes` what has become of it when its bytes are characters.
    `ignore_merges`: a piece that is a token as a whole skips the merges. `nfc`: text is normalised to NFC.
    `add_bos`: sequences start with bos where a file does not say.
    """

    regexes: tuple[str, ...]
    byte_regexes: tuple[str, ...] = ()
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_REGEX, DIGITS, "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2_REGEX,)),
    "falcon": PreTokenizer((PUNCTUATION, GPT2_REGEX), (DIGITS, "[0-9][0-9][0-9]")),
    "smollm": PreTokenizer((DIGIT, GPT2_REGEX)),
    "command-r": PreTokenizer((DIGIT, GPT2_REGEX), nfc=True),
    "llama-bpe": PreTokenizer((_CL100K,), ignore_merges=True, add_bos=True),
    "smaug-bpe": PreTokenizer((_CL100K,)),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "stablelm2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        nfc=True,
    ),
    "tekken": PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_O200K,)),
    "tiny_aya": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK,
            DIGITS,
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, DIGIT)),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3)),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _CJK_KANA,
            rf"{_PUNCTUATED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            DIGIT,
        )
    ),
    "youtu": PreTokenizer((_YOUTU, _cased(_CONTRACTION + "?", r"\p{N}")), ignore_merges=True),
    "afmoe": PreTokenizer((r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3)),
    "kimi-k2": PreTokenizer(
        (r"[\p{Han}]+|" + _cased(_CONTRACTION + "?", r"\p{N}{1,3}", _TAIL, r"&&[^\p{Han}]"),)
    ),
    "bloom": PreTokenizer((_BLOOM,)),
    "viking": PreTokenizer((_BLOOM, DIGIT)),
    "jais-2": PreTokenizer(
        (
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
            rf"|{_JAIS2_SPACES}|\s{{1}}",
        )
    ),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_TAIL}"), ignore_merges=True
    ),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "bailingmoe": PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_TAIL}",)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2_REGEX,
        ),
        add_bos=True,
    ),
}
_SAME = {
    "gpt-2": "mpt olmo phi-2 jais gigachat a.x-4.0 mellum trillion granite-docling exaone4",
    "smollm": "starcoder refact codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    "smaug-bpe": "dbrx chatglm-bpe glm4",
    "qwen2": "megrez",
    "stablelm2": "deepseek-r1-qwen kormo hunyuan solar-open grok-2",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "tiny_aya": "cohere2moe",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "bloom": "gpt3-finnish poro-chat",
    "bailingmoe": "bailingmoe2 llada-moe",
}
ALIASES = {alias: name for name, aliases in _SAME.items() for alias in aliases.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the row of a GGUF name (`tokenizer.ggml.pre`); PiError names the supported ones."""
    row = PRE_TOKENIZERS.get(ALIASES.get(name, name))
    if row is None:
        known = ", ".join(sorted([*PRE_TOKENIZERS, *ALIASES]))
        raise PiError(f"unsupported {TokenizerKey.PRE} {name!r:.60}", hint=f"supported: {known}")
    return row


def recognise(section: Mapping[str, Any] | None, *, ignore_merges: bool, nfc: bool) -> str | None:
    """Return the GGUF name of a `pre_tokenizer` section of tokenizer.json, None where no row fits.

    The regexes decide; among rows with the same ones, the one that also agrees on merges and NFC.
    """
    regexes = _canonical(section)
    rows = PRE_TOKENIZERS.items()
    fitting = [name for name, row in rows if (row.regexes, row.byte_regexes) == regexes]
    for name in fitting:
        row = PRE_TOKENIZERS[name]
        if (row.ignore_merges, row.nfc) == (ignore_merges, nfc):
            return name
    return fitting[0] if fitting else None


def _canonical(
    section: Mapping[str, Any] | None,
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Return the regexes before and after ByteLevel, None where the section does anything else."""
    before: list[str] = []
    after: list[str] = []
    is_bytes = False
    for step in _flatten(section):
        regex = _regex_of(step)
        if regex is None or (is_bytes and step["type"] == "ByteLevel"):
            return None
        if regex:
            (after if is_bytes else before).append(regex)
        is_bytes = is_bytes or step["type"] == "ByteLevel"
    return (tuple(before), tuple(after)) if is_bytes else None


def _flatten(section: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if section is None:
        return []
    if section["type"] == "Sequence":
        return [step for part in section["pretokenizers"] for step in _flatten(part)]
    return [section]


def _regex_of(step: Mapping[str, Any]) -> str | None:
    """Return the regex of one step, "" for one that does not cut, None for one that is no regex."""
    match step:
        case {"type": "ByteLevel"}:
            return GPT2_REGEX if step.get("use_regex", True) else ""
        case {"type": "Digits", "individual_digits": individual}:
            return DIGIT if individual else DIGITS
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            return PUNCTUATION
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}:
            return None if step.get("invert") else _escaped(regex)
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Removed", "invert": True}:
            return _escaped(regex)  # drops gaps; the rows that are written so leave none
    return None


def _escaped(regex: str) -> str:
    """Write line ends as escapes: files have both."""
    return regex.replace("\r", r"\r").replace("\n", r"\n")
