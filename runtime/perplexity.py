"""Perplexity: exp of the mean negative log-likelihood of the tokens of a text.

The text is cut into windows that do not overlap; every token of a window but its first is predicted from
those before it. Where the tokenizer puts BOS before a text, every window starts with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.runtime.model import Model

DEFAULT_WINDOW = 512
MAX_LOSS = 700.0  # its exponential is still a float


@dataclass(frozen=True)
class Perplexity:
    """The measure and the number of predicted tokens behind it."""

    value: float
    n_tokens: int


def cut_windows(
    model: Model, text: str | Sequence[int], window: int | None = None, chunks: int = -1
) -> list[list[int]]:
    """Return the windows of a text, or of token ids without BOS; the first `chunks` of them if not negative.

    `window` counts tokens, BOS included: by default 512 or the context, if that is less. UsageError for a
    window out of range and a text without a token to predict.
    """
    context = model.plan.n_context
    size = min(DEFAULT_WINDOW, context) if window is None else window
    if not 2 <= size <= context:
        raise UsageError(f"a window of {size} tokens is out of range", hint=f"give 2 to {context}")
    tokenizer = model.tokenizer
    ids = tokenizer.encode(text, add_special=False) if isinstance(text, str) else list(text)
    first = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    step = size - len(first)
    windows = [first + ids[begin : begin + step] for begin in range(0, len(ids), step)]
    windows = [w for w in windows if len(w) > 1][: chunks if chunks >= 0 else None]
    if not windows:
        raise UsageError("no token to predict", hint="give a longer text")
    return windows


def measure(model: Model, windows: Iterable[Sequence[int]]) -> Perplexity:
    """Return the perplexity over all windows; PiError where it is no finite number."""
    total, n_tokens = 0.0, 0
    for window in windows:
        logprobs = model.score(window)
        total += float(logprobs.sum(dtype="float64"))
        n_tokens += logprobs.size
    loss = -total / n_tokens
    if not loss < MAX_LOSS:  # NaN too
        raise PiError(
            f"the mean negative log-likelihood of the text is {loss}: the model does not work",
            hint="the weights are damaged, or overflow in this type; try another --outtype",
        )
    return Perplexity(math.exp(loss), n_tokens)
