"""What a task of lm_eval says of a generation, in this toolkit's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.runtime.sampling import Sampling
from powerinfer_toolkit.runtime.tokenizer import Tokenizer

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = ("until", "do_sample", "temperature", "top_k", "top_p", "min_p", "seed", *_LENGTHS)


@dataclass(frozen=True)
class GenerationSettings:
    """Stop texts, most new tokens and how they are drawn."""

    until: tuple[str, ...]
    n_predict: int
    sampling: Sampling


def generation_settings(options: Mapping[str, Any], default_length: int) -> GenerationSettings:
    """Read a task's generation_kwargs: greedy unless do_sample or a temperature is set.

    UsageError for options that this toolkit does not have.
    """
    unknown = sorted(set(options) - set(_KNOWN))
    if unknown:
        raise UsageError(
            f"generation_kwargs: {', '.join(unknown)} is not supported",
            hint=f"supported: {', '.join(_KNOWN)}",
        )
    until = options.get("until") or []
    lengths = [options[name] for name in _LENGTHS if options.get(name) is not None]
    return GenerationSettings(
        until=(until,) if isinstance(until, str) else tuple(until),
        n_predict=int(lengths[0]) if lengths else default_length,
        sampling=_sampling(options),
    )


def _sampling(options: Mapping[str, Any]) -> Sampling:
    temperature = float(options.get("temperature") or 0.0)
    if not options.get("do_sample", temperature > 0):
        return Sampling(temperature=0)
    return Sampling(
        top_k=int(options.get("top_k", 50)),  # transformers' default, as the two below
        top_p=float(options.get("top_p", 1.0)),
        min_p=float(options.get("min_p", 0.0)),
        temperature=temperature or 1.0,
        seed=options.get("seed", 0),
    )


class StopTexts:
    """Texts that end a generation; one that is a special token ends it as that token, which text leaves out."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self.texts = tuple(text for text in texts if text)
        ids = (tokenizer.token_id(text) for text in self.texts)
        self.token_ids = {i for i in ids if i is not None and tokenizer.is_special(i)}

    def cut(self, text: str) -> str:
        """Return what comes before the first of them."""
        for stop in self.texts:
            text = text.split(stop)[0]
        return text
