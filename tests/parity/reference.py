"""The forward pass of the Llama family in float64 numpy: the truth that the engine is compared with.

Sources: the papers of RMSNorm, RoPE, GQA and GLU variants; GGUF's conventions (interleaved rope pairs,
rope_freqs divisors); PowerInfer's FFN graph (predictor on the un-normalised residual after attention,
neuron active iff its logit >= the threshold, ReLU on the gate only).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.gguf_file import Array, GgufFile

# Types that the engine multiplies with int8 activations.
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")
QUANTISED += ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
INT8_BLOCK = 32
PRECISE_POSITIONS = 4  # the first of a sequence: attention sinks


@dataclass(frozen=True)
class Config:
    """Hyper-parameters, with the defaults of a file that carries the minimal keys."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_rot: int
    rms_eps: float
    rope_theta: float
    rope_linear_factor: float
    sliding_window: int
    activation: str
    activation_threshold: float
    sparse_threshold: float
    exact_layers: tuple[bool, ...]


def read_config(file: GgufFile) -> Config:
    def key(name: str, default: Any = None) -> Any:
        return file.key(f"llama.{name}", default)

    n_layers, n_heads = key("block_count"), key("attention.head_count")
    head_dim = key("attention.key_length", key("embedding_length") // n_heads)
    linear = key("rope.scaling.type", "none") == "linear"
    sparse = file.has("blk.0.ffn_down_t.weight")
    return Config(
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=key("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        n_rot=key("rope.dimension_count", head_dim),
        rms_eps=key("attention.layer_norm_rms_epsilon"),
        rope_theta=key("rope.freq_base", 10000.0),
        rope_linear_factor=key("rope.scaling.factor", 1.0) if linear else 1.0,
        sliding_window=key("attention.sliding_window", 0),
        activation=file.key("powerinfer.activation", "relu" if sparse else "silu"),
        activation_threshold=file.key("powerinfer.activation_threshold", 0.0),
        sparse_threshold=file.key("powerinfer.sparse_threshold", 0.0),
        exact_layers=tuple(file.key("powerinfer.predictor.exact_layers", [False] * n_layers)),
    )


@dataclass
class Trace:
    """What a run saw inside: predictor logits less the threshold, and how many gates were open."""

    margins: list[Array] = field(default_factory=list)  # per layer [n_tokens, n_ff]
    open_gates: list[NDArray[np.bool_]] = field(default_factory=list)  # per layer [n_tokens, n_ff]


class Reference:
    """Logits of token sequences from the tensors of `file`.

    With `int8_activations` every product with a quantised matrix rounds its input to int8 blocks first, as
    the engine's int8 kernels do; the down product over ffn_down_t takes the input as it is, and so do the layers'
    products (predictors apart) at PRECISE_POSITIONS.
    """

    def __init__(self, file: GgufFile, *, int8_activations: bool = False) -> None:
        self.file = file
        self.config = read_config(file)
        self.int8_activations = int8_activations

    @classmethod
    def load(cls, path: Path, *, int8_activations: bool = False) -> Reference:
        return cls(GgufFile(path), int8_activations=int8_activations)

    def logits(
        self,
        tokens: list[int],
        *,
        masked: NDArray[np.bool_] | None = None,
        threshold: float | None = None,
        trace: Trace | None = None,
    ) -> Array:
        """[n_tokens, n_vocab]. `masked` [n_tokens] says where the predictor drops neurons (None: nowhere);
        `threshold` replaces the file's."""
        x = self.embed(tokens)
        if masked is None:
            masked = np.zeros(len(tokens), dtype=bool)
        for layer in range(self.config.n_layers):
            x = self.attend(x, layer)
            x = x + self.ffn(x, layer, masked, threshold, trace)
        return self.head(x)

    def embed(self, tokens: list[int]) -> Array:
        return self.file.tensor("token_embd.weight")[tokens]

    def head(self, x: Array) -> Array:
        name = "output.weight" if self.file.has("output.weight") else "token_embd.weight"
        return self.product(self.norm(x, "output_norm.weight"), name, n_precise=0)

    def norm(self, x: Array, name: str) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + self.config.rms_eps) * self.file.tensor(name)

    def product(self, x: Array, name: str, n_precise: int = PRECISE_POSITIONS) -> Array:
        """x [n_tokens, n_cols] times the transpose of the matrix `name` [n_rows, n_cols]."""
        if self.int8_activations and self.file.type_of(name).name in QUANTISED:
            x = np.concatenate([x[:n_precise], round_to_int8(x[n_precise:])])
        return x @ self.file.tensor(name).T

    def attend(self, x: Array, layer: int) -> Array:
        """The residual after attention, [n_tokens, n_embd]."""
        c = self.config
        n = self.norm(x, f"blk.{layer}.attn_norm.weight")
        q = self.rotate(self.projected(n, layer, "q", c.n_heads))
        k = self.rotate(self.projected(n, layer, "k", c.n_kv_heads))
        v = self.projected(n, layer, "v", c.n_kv_heads)
        heads = attention(q, k, v, c.sliding_window)
        return x + self.biased(heads.reshape(len(x), -1), f"blk.{layer}.attn_output")

    def projected(self, n: Array, layer: int, which: str, n_heads: int) -> Array:
        flat = self.biased(n, f"blk.{layer}.attn_{which}")
        return flat.reshape(len(n), n_heads, self.config.head_dim)

    def biased(self, x: Array, name: str) -> Array:
        y = self.product(x, f"{name}.weight")
        return y + self.file.tensor(f"{name}.bias") if self.file.has(f"{name}.bias") else y

    def rotate(self, x: Array) -> Array:
        """Rope over neighbouring pairs of x [n_tokens, n_heads, head_dim]; token t is at position t."""
        pairs = np.arange(self.config.n_rot // 2)
        frequency = self.config.rope_theta ** (-2.0 * pairs / self.config.n_rot)
        frequency = frequency / self.config.rope_linear_factor
        if self.file.has("rope_freqs.weight"):
            frequency = frequency / self.file.tensor("rope_freqs.weight")
        turn = np.exp(1j * np.arange(len(x))[:, None, None] * frequency)
        n_rot = self.config.n_rot
        turned = (x[..., 0:n_rot:2] + 1j * x[..., 1:n_rot:2]) * turn
        out = x.copy()
        out[..., 0:n_rot:2], out[..., 1:n_rot:2] = turned.real, turned.imag
        return out

    def ffn(
        self,
        x: Array,
        layer: int,
        masked: NDArray[np.bool_],
        threshold: float | None = None,
        trace: Trace | None = None,
    ) -> Array:
        """The FFN's addition to the residual x [n_tokens, n_embd]."""
        n = self.norm(x, f"blk.{layer}.ffn_norm.weight")
        gate = self.product(n, f"blk.{layer}.ffn_gate.weight")
        hidden = self.activate(gate) * self.product(n, f"blk.{layer}.ffn_up.weight")
        if trace is not None:
            trace.open_gates.append(gate > self.config.activation_threshold)
        if masked.any() and not self.config.exact_layers[layer]:
            margin = self.predict(x, layer, threshold)
            hidden = np.where(masked[:, None] & (margin < 0), 0.0, hidden)
            if trace is not None:
                trace.margins.append(margin[masked])
        return self.down(hidden, layer)

    def activate(self, gate: Array) -> Array:
        if self.config.activation == "relu":
            return np.where(gate > self.config.activation_threshold, gate, 0.0)
        return gate / (1.0 + np.exp(-gate))

    def predict(self, x: Array, layer: int, threshold: float | None = None) -> Array:
        """Predictor logits less the threshold [n_tokens, n_ff]; negative: the neuron is dropped."""
        inner = np.maximum(self.product(x, f"blk.{layer}.fc1.weight", n_precise=0), 0.0)
        logit = self.product(inner, f"blk.{layer}.fc2.weight", n_precise=0)
        return logit - (self.config.sparse_threshold if threshold is None else threshold)

    def down(self, hidden: Array, layer: int) -> Array:
        transposed = f"blk.{layer}.ffn_down_t.weight"
        if self.file.has(transposed):
            return hidden @ self.file.tensor(transposed)
        return self.product(hidden, f"blk.{layer}.ffn_down.weight")


def attention(q: Array, k: Array, v: Array, sliding_window: int) -> Array:
    """Causal softmax attention. q [n_tokens, n_heads, head_dim], k and v [n_tokens, n_kv_heads, head_dim]."""
    n_tokens, n_heads, head_dim = q.shape
    group = n_heads // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim)
    age = np.arange(n_tokens)[:, None] - np.arange(n_tokens)[None, :]
    visible = (age >= 0) & ((age < sliding_window) | (sliding_window == 0))
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v)


def round_to_int8(x: Array) -> Array:
    """x [n_tokens, n] as blocks of 32 with scale amax / 127 (a float32), rounded to the nearest integer."""
    blocks = x.reshape(x.shape[0], -1, INT8_BLOCK)
    peak = np.abs(blocks).max(axis=-1, keepdims=True).astype(np.float32)
    scale = (peak / np.float32(127)).astype(np.float64)
    safe = np.where(scale == 0, 1.0, scale)
    return (np.rint(blocks / safe) * scale).reshape(x.shape)
