"""Log-probabilities of many texts, computed together: common beginnings once, different ends in one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.runtime.engine import Batch, FfnRule
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.plan.plan import FfnMode


@dataclass(frozen=True)
class Text:
    """Tokens of which the last `n_scored` are predicted, each from those before it."""

    tokens: tuple[int, ...]
    n_scored: int

    @property
    def inputs(self) -> tuple[int, ...]:
        """The tokens that enter the model: all but the last."""
        return self.tokens[:-1]

    @property
    def n_read(self) -> int:
        """Inputs that predict nothing that is wanted."""
        return len(self.inputs) - self.n_scored


@dataclass(frozen=True)
class Score:
    """Sum of natural-log probabilities, and whether greedy decoding would have written these tokens.

    `is_greedy` is True where that was not asked for.
    """

    logprob: float
    is_greedy: bool


class Scorer:
    """Scores texts with an open model; the model's sequences are the scorer's meanwhile.

    Every token is computed as decoding computes it: in predicted mode all but the sink positions are masked, so
    that a score does not depend on how texts are put together.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        predicted = model.plan.ffn_mode is FfnMode.PREDICTED
        self._rule = FfnRule.PREDICT if predicted else FfnRule.AUTO
        self._held: tuple[int, ...] = ()  # by sequence 0

    def score(self, texts: Sequence[Text], *, greedy: bool) -> Iterator[tuple[int, Score]]:
        """Yield (number of the text, its score), in an order that shares beginnings.

        Without `greedy` no logits leave the engine.
        """
        self._model.forget()
        self._held = ()
        order = sorted(range(len(texts)), key=lambda i: texts[i].tokens)
        for numbers in _groups(order, self._model.plan.n_sequences):
            scores = self._score_together([texts[i] for i in numbers], greedy)
            yield from zip(numbers, scores, strict=True)

    def _score_together(self, texts: Sequence[Text], greedy: bool) -> list[Score]:
        """Score at most as many texts as there are sequences."""
        engine = self._model.engine
        n_shared = min(text.n_read for text in texts)
        n_shared = min(_common(texts[0].tokens, text.tokens, n_shared) for text in texts)
        self._hold(texts[0].tokens[:n_shared])
        for sequence in range(1, len(texts)):
            engine.kv_copy(0, sequence)
        sums, is_greedy = np.zeros(len(texts)), np.ones(len(texts), dtype=bool)
        for rows in self._steps(_rows(texts, n_shared)):
            wanted = rows.targets >= 0
            engine.run(
                Batch(
                    rows.tokens,
                    sequences=rows.sequences,
                    targets=rows.targets,
                    want_logits=wanted & greedy,
                    ffn_rules=self._rule,
                )
            )
            owners, targets = rows.sequences[wanted], rows.targets[wanted]
            np.add.at(sums, owners, engine.logprobs()[wanted].astype(np.float64))
            if greedy and wanted.any():
                hits = engine.logits().argmax(axis=1) == targets
                np.logical_and.at(is_greedy, owners, hits)
        self._held = texts[0].inputs
        return [Score(float(total), bool(hit)) for total, hit in zip(sums, is_greedy, strict=True)]

    def _hold(self, tokens: tuple[int, ...]) -> None:
        """Make sequence 0 hold these tokens."""
        n_kept = _common(self._held, tokens, len(tokens))
        self._model.engine.kv_truncate(0, n_kept)
        size = self._model.plan.max_batch_tokens
        for begin in range(n_kept, len(tokens), size):
            self._model.engine.run(Batch(tokens[begin : begin + size], ffn_rules=self._rule))

    def _steps(self, rows: _Rows) -> Iterator[_Rows]:
        size = self._model.plan.max_batch_tokens
        for begin in range(0, len(rows.tokens), size):
            part = slice(begin, begin + size)
            yield _Rows(rows.tokens[part], rows.sequences[part], rows.targets[part])


@dataclass(frozen=True)
class _Rows:
    """Tokens of several sequences, [n_rows] each; a target of -1 means that nothing is wanted."""

    tokens: NDArray[np.int32]
    sequences: NDArray[np.int32]
    targets: NDArray[np.int32]


def _rows(texts: Sequence[Text], n_shared: int) -> _Rows:
    """Return what is left of the texts behind their common beginning, one text after the other."""
    tokens: list[int] = []
    sequences: list[int] = []
    targets: list[int] = []
    for sequence, text in enumerate(texts):
        tokens += text.inputs[n_shared:]
        sequences += [sequence] * (len(text.inputs) - n_shared)
        targets += [-1] * (text.n_read - n_shared) + list(text.tokens[-text.n_scored :])
    return _Rows(*(np.array(column, dtype=np.int32) for column in (tokens, sequences, targets)))


def _common(one: Sequence[int], other: Sequence[int], most: int) -> int:
    """Return the length of the common beginning, at most `most`."""
    pairs = zip(one[:most], other[:most], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _groups(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for begin in range(0, len(numbers), size):
        yield numbers[begin : begin + size]
