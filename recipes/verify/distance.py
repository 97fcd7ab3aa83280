"""How far the logits of one model are from those of another, summed over windows of tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from powerinfer_toolkit.errors import PiError

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

    def add(self, got: Tensor, want: Tensor) -> None:
        """Add logits [n_tokens, n_vocab] of the same tokens; where one vocabulary is padded, the other's part counts.

        In float64, where they are.
        """
        n_vocab = min(got.shape[1], want.shape[1])
        for begin in range(0, len(want), AT_ONCE):
            end = begin + AT_ONCE
            self._add_rows(got[begin:end, :n_vocab].double(), want[begin:end, :n_vocab].double())

    def _add_rows(self, got: Tensor, want: Tensor) -> None:
        self._error += float((got - want).square().sum())
        self._size += float(want.square().sum())
        p, q = want.log_softmax(dim=1), got.log_softmax(dim=1)
        self._kl += float((p.exp() * (p - q)).sum())
        best, ours = want.argmax(dim=1, keepdim=True), got.argmax(dim=1, keepdim=True)
        gap = (want.gather(1, best) - want.gather(1, ours))[:, 0]
        allowed = self._tolerance * want.square().mean(dim=1).sqrt()
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

    def add(self, logits: Tensor, tokens: NDArray[np.int64]) -> None:
        """Add a window: logits [n_tokens, n_vocab] and its tokens, of which the first is not predicted."""
        targets = torch.from_numpy(tokens[1:]).to(logits.device)
        for begin in range(0, len(targets), AT_ONCE):
            of = targets[begin : begin + AT_ONCE]
            rows = logits[begin : begin + len(of)].double()
            self._total += float(cross_entropy(rows, of, reduction="sum"))
        self._n_tokens += len(targets)

    def perplexity(self, name: str) -> float:
        """Return exp of the mean; PiError where it is no finite number."""
        mean = self._total / self._n_tokens
        if not mean < MAX_LOSS:  # NaN too
            raise PiError(
                f"the mean negative log-likelihood of the text is {mean} under {name}",
                hint="its weights are damaged, or overflow",
            )
        return math.exp(mean)
