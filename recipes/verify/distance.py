"""How far the logits of one model are from those of another, summed over windows of tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.errors import PiError

Logits = NDArray[np.float32]  # [n_tokens, n_vocab]
AT_ONCE = 32  # rows in float64 at a time, several times n_vocab * 8 bytes each
MAX_LOSS = 700.0  # its exponential is still a float


class Distance:
    """Relative L2, KL(want || got) and agreement of the likeliest token, over all tokens that were added.

    `swaps` counts tokens whose likeliest one differs although an error of relative size `tolerance` in the logits
    does not explain it.
    """

    def __init__(self, tolerance: float, deviations: float) -> None:
        self._tolerance = tolerance * deviations * math.sqrt(2)
        self._error = self._size = self._kl = 0.0
        self._n_agree = self._n_tokens = self.swaps = 0

    def add(self, got: Logits, want: Logits) -> None:
        """Add logits of the same tokens; where one vocabulary is padded, the other's part counts."""
        n_vocab = min(got.shape[1], want.shape[1])
        for begin in range(0, len(want), AT_ONCE):
            end = begin + AT_ONCE
            self._add_rows(
                got[begin:end, :n_vocab].astype(np.float64),
                want[begin:end, :n_vocab].astype(np.float64),
            )

    def _add_rows(self, got: NDArray[np.float64], want: NDArray[np.float64]) -> None:
        self._error += float(np.square(got - want).sum())
        self._size += float(np.square(want).sum())
        p, q = log_softmax(want), log_softmax(got)
        self._kl += float((np.exp(p) * (p - q)).sum())
        rows = np.arange(len(want))
        best, ours = want.argmax(axis=1), got.argmax(axis=1)
        gap = want[rows, best] - want[rows, ours]
        allowed = self._tolerance * np.sqrt(np.square(want).mean(axis=1))
        self._n_agree += int((best == ours).sum())
        self.swaps += int((gap > allowed).sum())
        self._n_tokens += len(want)

    @property
    def relative_l2(self) -> float:
        """|got - want| / |want|."""
        return math.sqrt(self._error / self._size)

    @property
    def kl(self) -> float:
        """Mean KL(want || got) in nats."""
        return self._kl / self._n_tokens

    def to_record(self) -> dict[str, Any]:
        """Return the measures as plain values."""
        return {
            "relative_l2": self.relative_l2,
            "kl": self.kl,
            "top1_agreement": self._n_agree / self._n_tokens,
            "tokens": self._n_tokens,
        }


class Loss:
    """The mean negative log-likelihood of tokens, from logits."""

    def __init__(self) -> None:
        self._total, self._n_tokens = 0.0, 0

    def add(self, logits: Logits, tokens: NDArray[np.int64]) -> None:
        """Add a window: logits [n_tokens, n_vocab] and its tokens, of which the first is not predicted."""
        for begin in range(0, len(tokens) - 1, AT_ONCE):
            targets = tokens[begin + 1 : begin + 1 + AT_ONCE]
            rows = log_softmax(logits[begin : begin + len(targets)].astype(np.float64))
            self._total -= float(rows[np.arange(len(targets)), targets].sum())
        self._n_tokens += len(tokens) - 1

    def perplexity(self, name: str) -> float:
        """Return exp of the mean; PiError where it is no finite number."""
        mean = self._total / self._n_tokens
        if not mean < MAX_LOSS:  # NaN too
            raise PiError(
                f"the mean negative log-likelihood of the text is {mean} under {name}",
                hint="its weights are damaged, or overflow",
            )
        return math.exp(mean)


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log-probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return log
