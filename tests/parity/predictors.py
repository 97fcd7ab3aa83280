"""Predictors for synthetic models whose masks are unambiguous on a given prompt.

A neuron whose logit is near the threshold flips on the smallest rounding and adds or drops its whole
contribution: a relative error d of the stream then becomes about sqrt(d) one layer later, which no tolerance
could tell from a fault. So fc2 is drawn row by row until no logit of the prompt is near the threshold.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from parity.gguf_file import Array, GgufFile
from parity.reference import Reference
from parity.synthetic import Shape, TypeOf, Weights, write_gguf


class _Unfinished(GgufFile):
    """Tensors of a file that is being made, rounded to its types."""

    def __init__(self, path: Path, weights: Weights, type_of: TypeOf) -> None:
        super().__init__(path)
        self.weights, self.types = weights, type_of

    def tensor(self, name: str) -> Array:
        return rounded(self.weights[name], self.types(name))


def rounded(values: NDArray[np.float32], type_: Type) -> Array:
    if values.ndim == 1:
        return values.astype(np.float64)
    return gguf.quants.dequantize(gguf.quants.quantize(values, type_), type_).astype(np.float64)


def clear_masks(
    scratch: Path,
    shape: Shape,
    weights: Weights,
    type_of: TypeOf,
    prompt: list[int],
    masked: NDArray[np.bool_],
    *,
    margin: float,
    threshold: float = 0.0,
    exact_layers: tuple[bool, ...] | None = None,
) -> None:
    """Replaces fc2 of every layer so that the logits of the masked positions of `prompt` keep at least
    `margin` standard deviations from the threshold. `scratch` is a file name to use meanwhile."""
    write_gguf(scratch, shape, weights, type_of=type_of)
    reference = Reference(_Unfinished(scratch, weights, type_of))
    if exact_layers is not None:
        reference.config = replace(reference.config, exact_layers=exact_layers)
    x = reference.embed(prompt)
    for layer in range(shape.n_layers):
        x = reference.attend(x, layer)
        inner = np.maximum(reference.product(x[masked], f"blk.{layer}.fc1.weight"), 0.0)
        name = f"blk.{layer}.fc2.weight"
        rng = np.random.default_rng(1000 + layer)
        weights[name] = _draw_rows(rng, inner, shape.n_ff, type_of(name), margin, threshold)
        x = x + reference.ffn(x, layer, masked, threshold)
    scratch.unlink()


def _draw_rows(
    rng: np.random.Generator,
    inner: Array,
    n_ff: int,
    type_: Type,
    margin: float,
    threshold: float,
) -> NDArray[np.float32]:
    """Rows [n_ff, rank] whose products with every `inner` [n_tokens, rank] are clear of the threshold."""
    kept = np.empty((0, inner.shape[1]), dtype=np.float32)
    while len(kept) < n_ff:
        rows = rng.standard_normal((4 * n_ff, inner.shape[1]), dtype=np.float32)
        rows /= np.float32(np.sqrt(inner.shape[1]))
        logits = inner @ rounded(rows, type_).T
        clear = np.abs(logits - threshold).min(axis=0) >= margin * logits.std()
        kept = np.concatenate([kept, rows[clear]])
    return np.ascontiguousarray(kept[:n_ff])
