"""The windows of tokens that both sides are measured on."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.recipes.verify.settings import VerifySettings
from powerinfer_toolkit.training.blocks import (
    Split,
    TextEncoder,
    TokenStore,
    begun_by,
    held_out_blocks,
)

Window = NDArray[np.int64]  # [n_tokens], after BOS where the tokenizer begins texts with it


def read_windows(settings: VerifySettings, encoder: TextEncoder) -> list[Window]:
    """Return windows of at most max_length tokens, max_tokens in all. Raises PiError without a token to predict."""
    if settings.file is None:
        return _held_out_windows(settings, encoder)
    try:
        text = Path(settings.file).read_text(encoding="utf-8")
    except UnicodeDecodeError as failure:
        raise PiError(
            f"{settings.file} is not UTF-8: {failure.reason} at byte {failure.start}",
            hint="give a text in UTF-8; iconv converts others",
        ) from failure
    first = [] if encoder.bos_id is None else [encoder.bos_id]
    (tokens,) = encoder.tokenize([text])
    step = settings.max_length - len(first)
    tokens = tokens[: settings.max_tokens]
    windows = [
        np.array([*first, *tokens[begin : begin + step]], dtype=np.int64)
        for begin in range(0, len(tokens), step)
    ]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise PiError(f"{settings.file} has no token to predict", hint="give a longer text")
    return windows


def _held_out_windows(settings: VerifySettings, encoder: TextEncoder) -> list[Window]:
    """Return blocks of documents that no training saw, the test part where they also calibrate."""
    n_blocks = max(1, settings.max_tokens // settings.max_length)
    with _token_dir(settings) as folder:
        store = TokenStore(settings, encoder, folder)
        store.make()
        blocks = held_out_blocks(store, Split.TEST, n_blocks)
        return list(begun_by(blocks, encoder.bos_id).astype(np.int64))


@contextlib.contextmanager
def _token_dir(settings: VerifySettings) -> Iterator[Path]:
    if settings.token_dir is not None:
        yield Path(settings.token_dir)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
