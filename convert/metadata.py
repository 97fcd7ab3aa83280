"""The metadata keys of an output file: general.*, the architecture's, the tokenizer's and powerinfer.*."""

from __future__ import annotations

import gguf
from gguf import GGUFValueType as ValueType

from powerinfer_toolkit.artifact import Manifest
from powerinfer_toolkit.convert.activations import Statistics
from powerinfer_toolkit.convert.config import ModelConfig, RopeKind
from powerinfer_toolkit.convert.layout import Layout
from powerinfer_toolkit.gguf_format import (
    FORMAT_VERSION,
    Activation,
    Dialect,
    Key,
    NeuronOrder,
    TensorType,
)
from powerinfer_toolkit.hub import LocalModel
from powerinfer_toolkit.tokenizer_keys import MetadataEntry

_FILE_TYPES = {
    TensorType.F32: gguf.LlamaFileType.ALL_F32,
    TensorType.F16: gguf.LlamaFileType.MOSTLY_F16,
    TensorType.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    TensorType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    TensorType.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
}


def general_keys(model: LocalModel, outtype: TensorType) -> list[MetadataEntry]:
    """Return the general.* keys besides the architecture, which the writer adds."""
    return [
        MetadataEntry("general.type", ValueType.STRING, "model"),
        MetadataEntry("general.name", ValueType.STRING, model.name.rpartition("/")[2]),
        MetadataEntry("general.file_type", ValueType.UINT32, int(_FILE_TYPES[outtype])),
        MetadataEntry("general.quantization_version", ValueType.UINT32, gguf.GGML_QUANT_VERSION),
    ]


def architecture_keys(config: ModelConfig) -> list[MetadataEntry]:
    """Return the hyper-parameters by llama.cpp's names."""
    prefix = config.arch.gguf_name
    integers = {
        "vocab_size": config.n_vocab,
        "context_length": config.n_ctx,
        "embedding_length": config.n_embd,
        "block_count": config.n_layers,
        "feed_forward_length": config.n_ff,
        "rope.dimension_count": config.head_dim,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
    }
    if config.head_dim * config.n_heads != config.n_embd:
        integers |= {
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
        }
    if 0 < config.sliding_window < config.n_ctx:
        integers["attention.sliding_window"] = config.sliding_window
    floats = {
        "rope.freq_base": config.rope.theta,
        "attention.layer_norm_rms_epsilon": config.rms_eps,
    }
    keys = [
        MetadataEntry(f"{prefix}.{name}", ValueType.UINT32, value)
        for name, value in integers.items()
    ]
    keys += [
        MetadataEntry(f"{prefix}.{name}", ValueType.FLOAT32, value)
        for name, value in floats.items()
    ]
    if config.rope.kind is RopeKind.LINEAR:
        keys += [
            MetadataEntry(f"{prefix}.rope.scaling.type", ValueType.STRING, "linear"),
            MetadataEntry(f"{prefix}.rope.scaling.factor", ValueType.FLOAT32, config.rope.factor),
        ]
    return keys


def powerinfer_keys(layout: Layout, statistics: Statistics | None) -> list[MetadataEntry]:
    """Return what the file says of its FFN: activation, order, modes, predictors, statistics."""
    order = NeuronOrder.ORIGINAL if layout.order is None else NeuronOrder.HOT_FIRST
    keys = [
        MetadataEntry(Key.FORMAT_VERSION, ValueType.UINT32, FORMAT_VERSION),
        MetadataEntry(Key.ACTIVATION, ValueType.STRING, str(layout.config.activation)),
        MetadataEntry(Key.NEURON_ORDER, ValueType.STRING, str(order)),
        MetadataEntry(Key.FFN_MODES, ValueType.ARRAY, _ffn_modes(layout), ValueType.STRING),
    ]
    if layout.dialect is not None:
        keys += _sparse_keys(layout, layout.dialect)
    if statistics is not None:
        keys += _statistics_keys(statistics)
    return keys


def _ffn_modes(layout: Layout) -> list[str]:
    modes = ["dense"]
    if layout.config.activation is Activation.RELU:
        modes.append("exact")
    if layout.predictors is not None:
        modes.append("predicted")
    return modes


def _sparse_keys(layout: Layout, dialect: Dialect) -> list[MetadataEntry]:
    kind, threshold = "none", 0.0
    if layout.predictors is not None:
        kind, threshold = "mlp", layout.predictors.sparse_threshold
    elif dialect is Dialect.UPSTREAM:
        kind = "all_active"
    keys = [
        MetadataEntry(Key.DIALECT, ValueType.STRING, str(dialect)),
        MetadataEntry(Key.ACTIVATION_THRESHOLD, ValueType.FLOAT32, 0.0),
        MetadataEntry(Key.PREDICTOR_KIND, ValueType.STRING, kind),
    ]
    if kind != "none":
        keys.append(MetadataEntry(Key.SPARSE_THRESHOLD, ValueType.FLOAT32, threshold))
    if kind == "mlp":
        keys.append(MetadataEntry(Key.SINK_POSITIONS, ValueType.UINT32, 1))
    return keys


def _statistics_keys(statistics: Statistics) -> list[MetadataEntry]:
    keys = [
        MetadataEntry(Key.STATISTICS_SHA256, ValueType.STRING, statistics.sha256),
        MetadataEntry(
            Key.STATISTICS_COVERAGE,
            ValueType.ARRAY,
            statistics.coverage().reshape(-1).tolist(),
            ValueType.FLOAT32,
        ),
    ]
    density = statistics.density()
    if statistics.tokens is not None and density is not None:
        keys += [
            MetadataEntry(Key.STATISTICS_TOKENS, ValueType.UINT64, statistics.tokens),
            MetadataEntry(
                Key.STATISTICS_DENSITY, ValueType.ARRAY, density.tolist(), ValueType.FLOAT32
            ),
        ]
    return keys


def origin_keys(model: LocalModel, manifest: Manifest, weights_sha256: str) -> list[MetadataEntry]:
    """Return where the weights came from, and the manifest."""
    texts = {
        Key.SOURCE_NAME: model.name,
        Key.SOURCE_REVISION: model.revision,
        Key.SOURCE_SHA256: weights_sha256,
        Key.MANIFEST: manifest.to_json(),
    }
    return [MetadataEntry(key, ValueType.STRING, text) for key, text in texts.items() if text]
