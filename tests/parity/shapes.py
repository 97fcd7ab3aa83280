"""Shapes of published models as their files would describe them, to plan for without the files."""

from __future__ import annotations

import dataclasses

from parity.small_plan import SHAPE
from powerinfer_toolkit.gguf_format import Activation, TensorType
from powerinfer_toolkit.runtime.model_parts import TensorEntry, model_bytes
from powerinfer_toolkit.runtime.plan.shape import Firing, ModelShape
from powerinfer_toolkit.runtime.synth.firing import Locality, firing
from powerinfer_toolkit.runtime.synth.shapes import SynthShape, find_shape
from powerinfer_toolkit.statistics import coverage_curves

BLOCKS = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.Q8_0: (32, 34),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_K: (256, 144),
}


def described(
    name: str | SynthShape,
    kind: TensorType = TensorType.F16,
    *,
    zeros: float = 0.9,
    dense: bool = False,
    predictors: bool = True,
    loss: float | None = 0.0,
) -> ModelShape:
    """Return what ModelFile would read of `pi-bench synth NAME`, with a recorded perplexity loss."""
    s = find_shape(name) if isinstance(name, str) else name
    tensors = list(_tensors(s, kind, dense=dense, predictors=predictors and not dense))
    sizes = model_bytes(tensors, s.n_layers)
    fires = firing(s.n_ff, Locality.SMOLLM2, zeros)
    curve = tuple(coverage_curves(fires.rates[None])[0].tolist())
    return dataclasses.replace(
        SHAPE,
        **{field: getattr(s, field) for field in ("n_layers", "n_embd", "n_ff", "n_vocab")},
        **{field: getattr(s, field) for field in ("n_heads", "n_kv_heads", "head_dim")},
        n_rot=s.head_dim,
        n_ctx_train=s.n_ctx,
        activation=Activation.SILU if dense else Activation.RELU,
        sparse_layout=not dense,
        has_predictors=predictors and not dense,
        predictor_kind="mlp" if predictors and not dense else "none",
        perplexity_loss=loss,
        weight_bytes=sum(tensor.n_bytes for tensor in tensors),
        predictor_bytes=sum(layer.predictor for layer in sizes.layers),
        sizes=sizes,
        firing=() if dense else (Firing(fires.density, curve),) * s.n_layers,
        predicted_density=fires.predicted_density if predictors and not dense else None,
    )


def _tensors(s: SynthShape, kind: TensorType, *, dense: bool, predictors: bool):
    n_kv = s.n_kv_heads * s.head_dim
    rows = {
        "attn_q": (s.n_embd, s.n_embd),
        "attn_k": (n_kv, s.n_embd),
        "attn_v": (n_kv, s.n_embd),
        "attn_output": (s.n_embd, s.n_embd),
        "ffn_gate": (s.n_ff, s.n_embd),
        "ffn_up": (s.n_ff, s.n_embd),
        "ffn_down" if dense else "ffn_down_t": (s.n_embd, s.n_ff) if dense else (s.n_ff, s.n_embd),
    }
    if predictors:
        rows |= {"fc1": (s.predictor_rank, s.n_embd), "fc2": (s.n_ff, s.predictor_rank)}
    for layer in range(s.n_layers):
        for name, (n_rows, n_cols) in rows.items():
            yield _matrix(f"blk.{layer}.{name}.weight", kind, n_rows, n_cols)
        for name in ("attn_norm", "ffn_norm"):
            yield TensorEntry(f"blk.{layer}.{name}.weight", 0, (s.n_embd,), 4 * s.n_embd)
    for name in ("token_embd", "output"):
        yield _matrix(f"{name}.weight", kind, s.n_vocab, s.n_embd)
    yield TensorEntry("output_norm.weight", 0, (s.n_embd,), 4 * s.n_embd)


def _matrix(name: str, kind: TensorType, n_rows: int, n_cols: int) -> TensorEntry:
    elements, n_bytes = BLOCKS[kind]
    return TensorEntry(name, kind, (n_cols, n_rows), n_rows * n_cols // elements * n_bytes)
