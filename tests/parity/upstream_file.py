"""Synthetic files as PowerInfer's own converters write them, and a prompt whose masks are unambiguous.

Contract: GGUF v3 behind the magic PWRI, llama architecture, ffn_down_t, fc1, fc2, no tensor or key beyond
PowerInfer's own, untied output; F16 as its converter writes it, or Q4_0 as its quantiser does (the output
matrix then Q8_0, since n_embd is not a multiple of 256).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from parity.gguf_file import GgufFile
from parity.reference import Reference
from parity.synthetic import Shape, TypeOf, Weights, random_weights, write_gguf

N_LAYERS = 12
PROMPT = [1, 259, 17, 262, 280, 33, 291, 270, 259, 101, 288, 265, 44, 276]


@dataclass(frozen=True)
class UpstreamFile:
    """What to write. `threshold` None: no key, so 0. `margin`: see `_choose_fc2`."""

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
    types = _types(spec.type)
    keys = {} if spec.threshold is None else {"powerinfer.sparse_threshold": spec.threshold}
    if spec.margin:
        _choose_fc2(path, shape, weights, spec, types)
    return write_gguf(path, shape, weights, type_of=types, keys=keys, minimal=True, magic=b"PWRI")


def _types(type_: Type) -> TypeOf:
    def of(name: str) -> Type:
        return Type.Q8_0 if name == "output.weight" and type_ == Type.Q4_0 else type_

    return of


class _Unfinished(GgufFile):
    """Tensors of a file that is being made, rounded to its types."""

    def __init__(self, path: Path, weights: Weights, types: TypeOf) -> None:
        super().__init__(path)
        self.weights, self.types = weights, types

    def tensor(self, name: str) -> NDArray[np.float64]:
        return _rounded(self.weights[name], self.types(name))


def _rounded(values: NDArray[np.float32], type_: Type) -> NDArray[np.float64]:
    if values.ndim == 1:
        return values.astype(np.float64)
    return gguf.quants.dequantize(gguf.quants.quantize(values, type_), type_).astype(np.float64)


def _choose_fc2(
    path: Path, shape: Shape, weights: Weights, spec: UpstreamFile, types: TypeOf
) -> None:
    """Draws fc2 layer by layer so that no logit of PROMPT is near the threshold.

    A neuron whose logit is near it flips on the smallest rounding and adds its whole contribution: a relative
    error d of the stream then becomes about sqrt(d) a layer later, which no tolerance of the graph could tell
    from a fault."""
    write_gguf(path, shape, weights, type_of=types, minimal=True)
    reference = Reference(_Unfinished(path, weights, types))
    masked = np.ones(len(PROMPT), dtype=bool)
    x = reference.embed(PROMPT)
    for layer in range(shape.n_layers):
        x = reference.attend(x, layer)
        inner = np.maximum(reference.product(x, f"blk.{layer}.fc1.weight"), 0.0)
        weights[f"blk.{layer}.fc2.weight"] = clear_fc2(inner, shape.n_ff, spec, layer)
        x = x + reference.ffn(x, layer, masked, spec.threshold)


def clear_fc2(
    inner: NDArray[np.float64], n_ff: int, spec: UpstreamFile, seed: int
) -> NDArray[np.float32]:
    """Rows [n_ff, rank] whose logits for every `inner` [n_tokens, rank] keep at least `margin` standard
    deviations from the threshold, after rounding to the file's type."""
    rng = np.random.default_rng(1000 + seed)
    threshold = spec.threshold or 0.0
    kept = np.empty((0, inner.shape[1]), dtype=np.float32)
    while len(kept) < n_ff:
        rows = rng.standard_normal((4 * n_ff, inner.shape[1]), dtype=np.float32)
        rows /= np.float32(np.sqrt(inner.shape[1]))
        logits = inner @ _rounded(rows, spec.type).T
        clear = np.abs(logits - threshold).min(axis=0) >= spec.margin * logits.std()
        kept = np.concatenate([kept, rows[clear]])
    return np.ascontiguousarray(kept[:n_ff])
