"""PowerInfer-GGUF in one place: magic, keys, tensor names, type ids. docs/format.md explains them.

Upstream's contract: tensors ffn_down_t, fc1, fc2 and the key powerinfer.sparse_threshold behind the
magic PWRI. Everything else under `powerinfer.` is this project's.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

GGUF_MAGIC = b"GGUF"
PWRI_MAGIC = b"PWRI"
ALIGNMENT = 32
FORMAT_VERSION = 1


class TensorType(IntEnum):
    """GGUF tensor type ids that this toolkit reads; it writes all but MXFP4 and NVFP4."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    BF16 = 30
    MXFP4 = 39
    NVFP4 = 40


class Dialect(StrEnum):
    """Which engines a sparse file is for: PowerInfer itself, or this toolkit only."""

    UPSTREAM = "upstream"
    EXTENDED = "extended"


class Activation(StrEnum):
    """The function on the FFN gate."""

    SILU = "silu"
    RELU = "relu"


class NeuronOrder(StrEnum):
    """How the neurons of a layer are numbered in the file."""

    ORIGINAL = "original"
    HOT_FIRST = "hot_first"


class Key:
    """Metadata keys under `powerinfer.` and the embedded tokenizer."""

    SPARSE_THRESHOLD = "powerinfer.sparse_threshold"  # f32, upstream's: active iff logit >= this
    FORMAT_VERSION = "powerinfer.format_version"  # u32
    DIALECT = "powerinfer.dialect"  # string, Dialect
    ACTIVATION = "powerinfer.activation"  # string, Activation
    ACTIVATION_THRESHOLD = "powerinfer.activation_threshold"  # f32: active iff gate > this
    NEURON_ORDER = "powerinfer.neuron_order"  # string, NeuronOrder
    FFN_MODES = "powerinfer.ffn_modes"  # [string]: dense, exact, predicted
    SINK_POSITIONS = "powerinfer.sink_positions"  # u32: positions < this are never masked
    PREDICTOR_KIND = "powerinfer.predictor.kind"  # "none", "all_active" (zeros), "mlp"
    PREDICTOR_EXACT_LAYERS = "powerinfer.predictor.exact_layers"  # [bool] per layer
    PREDICTOR_TARGET = "powerinfer.predictor.target"  # string
    PREDICTOR_RECALL = "powerinfer.predictor.recall"  # f32
    PREDICTOR_DENSITY = "powerinfer.predictor.density"  # f32
    PREDICTOR_PERPLEXITY_LOSS = "powerinfer.predictor.perplexity_loss"  # f32, 0.01 = 1%
    STATISTICS_TOKENS = "powerinfer.statistics.tokens"  # u64
    STATISTICS_SHA256 = "powerinfer.statistics.sha256"  # string, of the int64/float32 count array
    STATISTICS_COVERAGE = "powerinfer.statistics.coverage"  # [f32], n_layers x COVERAGE_POINTS
    STATISTICS_DENSITY = "powerinfer.statistics.density"  # [f32] per layer
    STATISTICS_UNION_DENSITY = "powerinfer.statistics.union_density"  # [f32], layers x windows
    SOURCE_NAME = "powerinfer.source.name"  # string
    SOURCE_REVISION = "powerinfer.source.revision"  # string
    SOURCE_SHA256 = "powerinfer.source.sha256"  # string, of the weights
    SYNTHETIC = "powerinfer.synthetic"  # string, the shape that random weights were made for
    MANIFEST = "powerinfer.manifest"  # string, JSON of artifact.Manifest
    TOKENIZER_JSON = "tokenizer.huggingface.json"  # string, the whole tokenizer.json


COVERAGE_POINTS = 129  # share of the hottest i/128 neurons -> share of activations
UNION_WINDOWS = (2, 4, 8, 16, 32, 64)  # tokens
MIN_UPSTREAM_N_FF = 1001  # upstream picks a faulty kernel at or below 1000 predictor outputs
EXACT_PREDICTOR_RANK = 32  # of the all-zero fc1/fc2 that make upstream compute every neuron


class Tensor:
    """Tensor names; layer tensors take the layer as `i`."""

    TOKEN_EMBD = "token_embd.weight"
    OUTPUT_NORM = "output_norm.weight"
    OUTPUT = "output.weight"
    ROPE_FREQS = "rope_freqs.weight"
    ATTN_NORM = "blk.{i}.attn_norm.weight"
    ATTN_Q = "blk.{i}.attn_q.weight"
    ATTN_K = "blk.{i}.attn_k.weight"
    ATTN_V = "blk.{i}.attn_v.weight"
    ATTN_OUTPUT = "blk.{i}.attn_output.weight"
    ATTN_Q_BIAS = "blk.{i}.attn_q.bias"
    ATTN_K_BIAS = "blk.{i}.attn_k.bias"
    ATTN_V_BIAS = "blk.{i}.attn_v.bias"
    ATTN_OUTPUT_BIAS = "blk.{i}.attn_output.bias"
    FFN_NORM = "blk.{i}.ffn_norm.weight"
    FFN_GATE = "blk.{i}.ffn_gate.weight"
    FFN_UP = "blk.{i}.ffn_up.weight"
    FFN_DOWN = "blk.{i}.ffn_down.weight"
    FFN_DOWN_T = "blk.{i}.ffn_down_t.weight"
    PREDICTOR_FC1 = "blk.{i}.fc1.weight"
    PREDICTOR_FC2 = "blk.{i}.fc2.weight"
