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

GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TIKTOKEN_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TIKTOKEN_TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TIKTOKEN_TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(contraction: str, digits: str) -> str:
    """Return the regex of o200k and Tekken: words end where lower case is followed by upper case."""
    word = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contraction}"
    capitals = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contraction}"
    return f"{word}|{capitals}|{digits}{_CASED_TAIL}"


@dataclass(frozen=True)
class PreTokenizer:
    """One way to cut text: `regexes` in order, and what tokenizers with this cut also do.

    `ignore_merges`: a piece that is a token as a whole skips the merges. `nfc`: text is normalised to NFC.
    `add_bos`: sequences start with bos where a file does not say.
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False


PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_REGEX, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((GPT2_REGEX,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2_REGEX)),
    "llama-bpe": PreTokenizer((_CL100K,), ignore_merges=True, add_bos=True),
    "smaug-bpe": PreTokenizer((_CL100K,)),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "tekken": PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((_cased(_CONTRACTION + "?", r"\p{N}{1,3}"),)),
    "deepseek-coder": PreTokenizer(
        ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一가-\ud7ff]+", r"\p{N}")
    ),
}
ALIASES = {
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "phi-2": "gpt-2",
    "jais": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "codeshell": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "dbrx": "smaug-bpe",
    "llama4": "gpt-4o",
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the row of a GGUF name (`tokenizer.ggml.pre`); PiError names the supported ones."""
    row = PRE_TOKENIZERS.get(ALIASES.get(name, name))
    if row is None:
        known = ", ".join(sorted([*PRE_TOKENIZERS, *ALIASES]))
        raise PiError(f"unsupported pre-tokenizer {name!r}", hint=f"supported: {known}")
    return row


def recognise(section: Mapping[str, Any] | None, *, ignore_merges: bool, nfc: bool) -> str | None:
    """Return the GGUF name of a `pre_tokenizer` section of tokenizer.json, None where no row fits.

    The regexes decide; among rows with the same ones, the one that also agrees on merges and NFC.
    """
    regexes = _canonical(section)
    fitting = [name for name, row in PRE_TOKENIZERS.items() if row.regexes == regexes]
    for name in fitting:
        row = PRE_TOKENIZERS[name]
        if (row.ignore_merges, row.nfc) == (ignore_merges, nfc):
            return name
    return fitting[0] if fitting else None


def _canonical(section: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """Return the section as regexes, None where it does anything else or does not end in ByteLevel."""
    steps = _flatten(section)
    if not steps or steps[-1]["type"] != "ByteLevel":
        return None
    regexes: list[str] = []
    for step in steps:
        regex = _regex_of(step)
        if regex is None:
            return None
        if regex:
            regexes.append(regex)
    return tuple(regexes)


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
            return r"\p{N}" if individual else r"\p{N}+"
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated"}:
            return None if step.get("invert") else str(regex)
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Removed", "invert": True}:
            return str(regex)  # drops gaps; the rows that are written so leave none
    return None
