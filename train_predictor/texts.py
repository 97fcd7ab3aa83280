"""The texts of one training as token blocks: to train on, to calibrate on, to report on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.train_predictor.settings import PredictorSettings
from powerinfer_toolkit.training.corpus import Corpus, TextColumns

Blocks = NDArray[np.int32]  # [n_blocks, max_length]
MIN_HELD_OUT_TOKENS = 1024


@dataclass(frozen=True)
class Texts:
    """Blocks that share no token."""

    train: Blocks
    calibration: Blocks
    test: Blocks


def read_texts(settings: PredictorSettings, tokenizer: Any) -> Texts:  # noqa: ANN401
    """Read the texts that the settings name; where none is named to hold out, spread blocks of `data` are.

    Raises PiError where there is too little to train or to calibrate on.
    """
    n_calibration, n_test = (
        _n_blocks(tokens, settings)
        for tokens in (settings.calibration_tokens, settings.test_tokens)
    )
    train = _read(settings.data, _n_blocks(settings.max_tokens, settings), settings, tokenizer)
    if settings.calibration_data:
        calibration = _read(settings.calibration_data, n_calibration, settings, tokenizer)
    else:
        train, calibration = _hold_out(train, n_calibration)
    if settings.test_data:
        test = _read(settings.test_data, n_test, settings, tokenizer)
    else:
        train, test = _hold_out(train, n_test)
    texts = Texts(train, calibration, test)
    for name in ("calibration", "test"):
        n_tokens = getattr(texts, name).size
        if n_tokens < MIN_HELD_OUT_TOKENS:
            raise PiError(
                f"{n_tokens} tokens are too few for the {name} text",
                hint="give more text to hold out",
            )
    if not len(train):
        raise PiError(
            "no text is left to train on", hint="give more data, or held-out texts of their own"
        )
    return texts


def _n_blocks(tokens: int, settings: PredictorSettings) -> int:
    return max(1, tokens // settings.max_length)


def _read(
    sources: Sequence[str],
    n_blocks: int,
    settings: PredictorSettings,
    tokenizer: Any,  # noqa: ANN401
) -> Blocks:
    """Return at most n_blocks whole blocks."""
    columns = TextColumns(settings.text_column, settings.messages_column, settings.split)
    corpus = Corpus(sources, tokenizer, settings.max_length, columns)
    whole = (block for block in corpus.blocks() if block.size == settings.max_length)
    rows = [block.astype(np.int32) for block in itertools.islice(whole, n_blocks)]
    return np.stack(rows) if rows else np.empty((0, settings.max_length), np.int32)


def _hold_out(blocks: Blocks, n_blocks: int) -> tuple[Blocks, Blocks]:
    """Return the blocks without n_blocks evenly spread ones (at most a tenth), and these."""
    n_held = min(n_blocks, len(blocks) // 10)
    held = np.zeros(len(blocks), np.bool_)
    held[np.linspace(0, len(blocks) - 1, n_held + 2, dtype=np.int64)[1:-1]] = True
    return blocks[~held], blocks[held]
