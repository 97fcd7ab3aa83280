"""The texts of one training as token blocks: to train on, to calibrate on, to report on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.train_predictor.settings import PredictorSettings
from powerinfer_toolkit.training.blocks import (
    Split,
    TokenStore,
    TrainingBlocks,
    begun_by,
    held_out_blocks,
)

Blocks = NDArray[np.uint32]  # [n_blocks, max_length]
MIN_HELD_OUT_TOKENS = 1024


@dataclass(frozen=True)
class Texts:
    """Blocks of documents that lie in one of the three only."""

    train: Blocks
    calibration: Blocks
    test: Blocks


def read_texts(settings: PredictorSettings, store: TokenStore) -> Texts:
    """Return the blocks of `store`, as many as the settings want. Raises PiError where there is too little."""
    train = TrainingBlocks(store, _n_blocks(settings.max_tokens, settings))
    held_out = {}
    for split, tokens in (
        (Split.CALIBRATION, settings.calibration_tokens),
        (Split.TEST, settings.test_tokens),
    ):
        blocks = held_out_blocks(store, split, _n_blocks(tokens, settings))
        if blocks.size < MIN_HELD_OUT_TOKENS:
            raise PiError(
                f"{blocks.size} tokens are too few for the {split} text",
                hint="raise held_out_share, or name more text in eval_mixture",
            )
        held_out[split] = begun_by(blocks, store.encoder.bos_id)
    return Texts(train.rows(range(len(train))), held_out[Split.CALIBRATION], held_out[Split.TEST])


def _n_blocks(tokens: int, settings: PredictorSettings) -> int:
    return max(1, tokens // settings.max_length)
