"""What planning needs to know of a model file: shapes, constants and what its keys claim."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer_toolkit.gguf_format import Activation


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes that the parts of a model take in the memory of a GPU."""

    layers: tuple[int, ...]  # weights of each layer, its predictor apart
    predictors: tuple[int, ...]  # of each layer, 0 without one
    embedding: int
    head: int  # 0 where the embedding serves
    predictor_rank: int  # of the largest


@dataclass(frozen=True)
class ModelShape:
    """Shapes and constants of a model file; sizes count elements unless the name says bytes."""

    n_layers: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_rot: int  # leading dimensions of a head that rope turns
    n_ctx_train: int
    sliding_window: int  # 0: none
    activation: Activation
    sparse_layout: bool  # the file stores ffn_down_t
    has_predictors: bool  # every layer has fc1 and fc2
    sink_positions: int  # leading positions that predicted mode computes exactly
    tied_head: bool
    float32_weights: bool  # every matrix but the predictors' is F32
    activation_threshold: float
    sparse_threshold: float
    rms_eps: float
    rope_theta: float
    weight_bytes: int
    predictor_kind: str = (
        "none"  # powerinfer.predictor.kind, "mlp" where an older file leaves it out
    )
    perplexity_loss: float | None = None  # of predicted mode as the file records it; 0.01 = 1%
    predictor_bytes: int = 0  # of weight_bytes, the part that only predicted mode reads
    device: DeviceBytes | None = None  # what the parts take on a GPU

    @property
    def predictable(self) -> bool:
        """Whether predicted mode can drop neurons: all-zero predictors let every neuron through."""
        return self.has_predictors and self.predictor_kind == "mlp"
