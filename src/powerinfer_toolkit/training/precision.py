"""How products of float32 matrices are computed on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch


@contextlib.contextmanager
def float32_products(mode: Literal["tf32", "ieee"]) -> Iterator[None]:
    """Let products of float32 matrices run as TF32 (10 bits of mantissa), or as float32 whatever was set before.

    torch from 2.9 on keeps the setting under a new name and refuses to answer under the old one in a process where
    anything, transformers' Trainer for one, has used the new one. What is not CUDA ignores it.
    """
    matmul = torch.backends.cuda.matmul
    named = hasattr(matmul, "fp32_precision")
    name, value = ("fp32_precision", mode) if named else ("allow_tf32", mode == "tf32")
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield
    finally:
        setattr(matmul, name, before)
