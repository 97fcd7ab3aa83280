"""What planning needs to know of a model file: shapes, constants and what its keys claim."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Activation

NEURON_STEP = 32  # a split lies at multiples of it


@dataclass(frozen=True)
class Columns:
    """A plain ffn_down, where a neuron is a column: n_rows rows of blocks along the neurons."""

    n_rows: int
    block_elements: int
    block_bytes: int


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of the parts of a layer; those of `device_` in the memory of a GPU, the others in the file.

    A GPU pads rows to 16 bytes and tensors to 256 (runtime/native/cuda/layout.h, memory.cu).
    """

    attention: int  # with both norms and the biases
    gate: int
    up_down: int
    predictor: int  # fc1 and fc2; 0 without one
    device_attention: int
    device_predictor: int
    device_rows: tuple[int, ...]  # from a neuron to the next, of gate, up and down_t
    device_columns: Columns | None = None  # the plain ffn_down instead of down_t

    def mapped_neurons(self, n: int, n_ff: int) -> int:
        """Return what n of n_ff neurons keep of the file in memory: of a plain ffn_down all, whose rows go through all."""
        if n == 0 or self.device_columns is None:
            return round_up((self.gate + self.up_down) * n, n_ff) // n_ff
        columns = self.device_columns
        down = columns.n_rows * -(-n_ff // columns.block_elements) * columns.block_bytes
        return down + round_up((self.gate + self.up_down - down) * n, n_ff) // n_ff

    @property
    def neuron_step(self) -> int:
        """Neurons by which a split moves: whole blocks of every matrix, and words of the masks."""
        return max(NEURON_STEP, self.device_columns.block_elements if self.device_columns else 0)

    def device_neurons(self, n: int) -> int:
        """Return what n neurons take on a GPU."""
        total = sum(round_up(n * stride, 256) for stride in self.device_rows)
        if self.device_columns is None or n == 0:
            return total
        columns = self.device_columns
        stride = round_up(-(-n // columns.block_elements) * columns.block_bytes, 16)
        return total + round_up(columns.n_rows * stride, 256)


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of the parts of a model."""

    layers: tuple[LayerBytes, ...]
    embedding: int
    head: int  # 0 where the embedding serves
    output_norm: int
    device_embedding: int
    device_head: int
    predictor_rank: int  # of the largest predictor, in multiples of 32


@dataclass(frozen=True)
class Firing:
    """How often a layer's neurons fire, by what the file records.

    `coverage` has COVERAGE_POINTS points, share of the hottest neurons -> share of the activations; it is empty where
    the file has none or is not sorted by it, and every neuron is then alike.
    """

    density: float  # mean share of the neurons that fire at a token
    coverage: tuple[float, ...] = ()


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
    sizes: ModelBytes | None = None  # of the parts
    firing: tuple[Firing, ...] = ()  # of each layer; empty: not known
    predicted_density: float | None = (
        None  # mean share of the neurons that the predictors let through
    )
    exact_layers: tuple[bool, ...] = ()  # layers whose predictor is not used; empty: none

    @property
    def predictable(self) -> bool:
        """Whether predicted mode can drop neurons: all-zero predictors let every neuron through."""
        return self.has_predictors and self.predictor_kind == "mlp"

    @property
    def parts(self) -> ModelBytes:
        """The sizes of the parts; PiError for a shape that came without them."""
        if self.sizes is None:
            raise PiError(
                "the shape says nothing of the sizes of its parts",
                hint="read the shape from a file: ModelFile(path).shape",
            )
        return self.sizes


def round_up(n: int, to: int) -> int:
    """Return the next multiple of `to`."""
    return -(-n // to) * to
