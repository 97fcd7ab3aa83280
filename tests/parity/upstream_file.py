"""Synthetic files as PowerInfer's own converters write them, and a prompt whose masks are unambiguous.

Contract: GGUF v3 behind the magic PWRI, llama architecture, ffn_down_t, fc1, fc2, no tensor or key beyond
PowerInfer's own, untied output; F16 as its converter writes it, or Q4_0 as its quantiser does (the output
matrix then Q8_0, since n_embd is not a multiple of 256).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type

from parity.predictors import clear_masks
from parity.synthetic import Shape, TypeOf, random_weights, write_gguf

N_LAYERS = 12
PROMPT = [1, 259, 17, 262, 280, 33, 291, 270, 259, 101, 288, 265, 44, 276]


@dataclass(frozen=True)
class UpstreamFile:
    """What to write. `threshold` None: no key, so 0; `margin` 0: any logits, else see `clear_masks`."""

    type: Type
    n_ff: int
    threshold: float | None = None
    margin: float = 0.0


def shape_of(spec: UpstreamFile) -> Shape:
    """Ranks differ from layer to layer; odd ones where the type has no blocks."""
    step, first = (32, 32) if spec.type == Type.Q4_0 else (6, 17)
    ranks = tuple(first + step * layer for layer in range(N_LAYERS))
    return Shape(n_layers=N_LAYERS, n_ff=spec.n_ff, n_heads=6, n_kv_heads=6, ranks=ranks)


def write_upstream(path: Path, spec: UpstreamFile, seed: int = 0) -> Path:
    shape = shape_of(spec)
    weights = random_weights(shape, seed)
    type_of = _types(spec.type)
    keys = {} if spec.threshold is None else {"powerinfer.sparse_threshold": spec.threshold}
    if spec.margin:
        everywhere = np.ones(len(PROMPT), dtype=bool)
        threshold = spec.threshold or 0.0
        clear_masks(
            path,
            shape,
            weights,
            type_of,
            PROMPT,
            everywhere,
            margin=spec.margin,
            threshold=threshold,
        )
    return write_gguf(path, shape, weights, type_of=type_of, keys=keys, minimal=True, magic=b"PWRI")


def _types(type_: Type) -> TypeOf:
    def of(name: str) -> Type:
        return Type.Q8_0 if name == "output.weight" and type_ == Type.Q4_0 else type_

    return of
