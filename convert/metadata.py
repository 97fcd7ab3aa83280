"""The metadata keys of an output file: general.*, the architecture's, the tokenizer's and powerinfer.*."""

from __future__ import annotations

import gguf
from gguf import GGUFValueType as ValueType

from powerinfer_toolkit.artifact import Manifest
from powerinfer_toolkit.convert.activations import Statistics
from powerinfer_toolkit.convert.config import ModelConfig, RopeKind
from powerinfer_toolkit.convert.layout import Layout
from powerinfer_toolkit.convert.outtypes import recipe
from powerinfer_toolkit.gguf_format import (
    FORMAT_VERSION,
    Activation,
    Dialect,
    Key,
)
from powerinfer_toolkit.gguf_keys import PackedKey
from powerinfer_toolkit.tokenizer_keys import MetadataEntry

# What the file says of its predictors: kept with them, else gone with them.
PREDICTOR_KEYS = (
    Key.SPARSE_THRESHOLD,
    Key.SINK_POSITIONS,
    Key.PREDICTOR_EXACT_LAYERS,
    Key.PREDICTOR_TARGET,
    Key.PREDICTOR_RECALL,
    Key.PREDICTOR_DENSITY,
    Key.PREDICTOR_PERPLEXITY_LOSS,
)
STATISTICS_KEYS = (
    Key.STATISTICS_SHA256,
    Key.STATISTICS_COVERAGE,
    Key.STATISTICS_TOKENS,
    Key.STATISTICS_DENSITY,
    Key.STATISTICS_UNION_DENSITY,
)
LAYOUT_KEYS = (Key.DIALECT, Key.ACTIVATION_THRESHOLD, Key.PREDICTOR_KIND)


def general_keys(name: str) -> list[MetadataEntry]:
    """Return what a checkpoint's file says of itself."""
    return [
        MetadataEntry("general.type", ValueType.STRING, "model"),
        MetadataEntry("general.name", ValueType.STRING, name.rpartition("/")[2]),
    ]


def architecture_keys(config: ModelConfig) -> list[MetadataEntry]:
    """Return the architecture and its hyper-parameters by llama.cpp's names."""
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
    keys = [MetadataEntry("general.architecture", ValueType.STRING, prefix)]
    keys += [
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


def output_keys(
    layout: Layout, statistics: Statistics | None, manifest: Manifest
) -> list[MetadataEntry]:
    """Return the keys that follow from this conversion: types, FFN, statistics and manifest."""
    keys = [
        MetadataEntry("general.quantization_version", ValueType.UINT32, gguf.GGML_QUANT_VERSION)
    ]
    if layout.outtype is not None:
        file_type = int(recipe(layout.outtype).file_type)
        keys.append(MetadataEntry("general.file_type", ValueType.UINT32, file_type))
    keys += _ffn_keys(layout)
    if statistics is not None:
        keys += _statistics_keys(statistics)
    return [*keys, MetadataEntry(Key.MANIFEST, ValueType.STRING, manifest.to_json())]


def merged(
    kept: list[PackedKey], layout: Layout, statistics: Statistics | None, new: list[PackedKey]
) -> list[PackedKey]:
    """Return the source's keys, each replaced in its place where `new` has it, then the rest of `new`.

    What describes a layout, predictors or statistics that the output does not have is left out.
    """
    stale = set(LAYOUT_KEYS)
    stale |= set() if layout.keeps_predictors else set(PREDICTOR_KEYS)
    if statistics is not None and statistics is not layout.source.statistics:
        stale |= set(STATISTICS_KEYS)
    by_name = {key.name: key for key in new}
    result = [
        by_name.pop(key.name, key) for key in kept if key.name in by_name or key.name not in stale
    ]
    return result + list(by_name.values())


def _ffn_keys(layout: Layout) -> list[MetadataEntry]:
    """Return what the file says of its FFN: activation, order, modes, layout, predictors."""
    activation = layout.source.config.activation
    keys = [
        MetadataEntry(Key.FORMAT_VERSION, ValueType.UINT32, FORMAT_VERSION),
        MetadataEntry(Key.ACTIVATION, ValueType.STRING, str(activation)),
        MetadataEntry(Key.NEURON_ORDER, ValueType.STRING, str(layout.neurons.kind)),
        MetadataEntry(Key.FFN_MODES, ValueType.ARRAY, _ffn_modes(layout), ValueType.STRING),
    ]
    return keys if layout.dialect is None else keys + _sparse_keys(layout, layout.dialect)


def _ffn_modes(layout: Layout) -> list[str]:
    modes = ["dense"]
    if layout.source.config.activation is Activation.RELU:
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
    activation_threshold = layout.source.config.activation_threshold
    keys = [
        MetadataEntry(Key.DIALECT, ValueType.STRING, str(dialect)),
        MetadataEntry(Key.ACTIVATION_THRESHOLD, ValueType.FLOAT32, activation_threshold),
        MetadataEntry(Key.PREDICTOR_KIND, ValueType.STRING, kind),
    ]
    if kind != "none":
        keys.append(MetadataEntry(Key.SPARSE_THRESHOLD, ValueType.FLOAT32, threshold))
    if layout.predictors is not None and not layout.keeps_predictors:
        keys.append(MetadataEntry(Key.SINK_POSITIONS, ValueType.UINT32, 1))
        keys += layout.predictors.measured
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
    if statistics.union_density is not None:
        union = statistics.union_density.reshape(-1).tolist()
        keys.append(
            MetadataEntry(Key.STATISTICS_UNION_DENSITY, ValueType.ARRAY, union, ValueType.FLOAT32)
        )
    density = statistics.density()
    if statistics.tokens is not None and density is not None:
        keys += [
            MetadataEntry(Key.STATISTICS_TOKENS, ValueType.UINT64, statistics.tokens),
            MetadataEntry(
                Key.STATISTICS_DENSITY, ValueType.ARRAY, density.tolist(), ValueType.FLOAT32
            ),
        ]
    return keys


def source_keys(name: str, revision: str, weights_sha256: str) -> list[MetadataEntry]:
    """Return where the weights came from."""
    texts = {
        Key.SOURCE_NAME: name,
        Key.SOURCE_REVISION: revision,
        Key.SOURCE_SHA256: weights_sha256,
    }
    return [MetadataEntry(key, ValueType.STRING, text) for key, text in texts.items() if text]
