"""The metadata of a synthetic model: sizes, a tokenizer of bytes, its neurons' statistics, and that it is synthetic."""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np
from gguf import GGUFValueType as ValueType

from powerinfer_toolkit.artifact import Manifest
from powerinfer_toolkit.gguf_format import (
    FORMAT_VERSION,
    Activation,
    Dialect,
    Key,
    NeuronOrder,
    TensorType,
)
from powerinfer_toolkit.runtime.synth.firing import Firing
from powerinfer_toolkit.runtime.synth.shapes import SynthShape
from powerinfer_toolkit.statistics import coverage_curves
from powerinfer_toolkit.tokenizer_format import (
    SPACE,
    TokenizerKey,
    TokenizerModel,
    TokenType,
    padding_name,
)
from powerinfer_toolkit.tokenizer_keys import MetadataEntry

_RMS_EPS = 1e-5
_SPECIAL = {
    "<unk>": TokenType.UNKNOWN,
    "<s>": TokenType.CONTROL,
    "</s>": TokenType.CONTROL,
}


def model_keys(
    shape: SynthShape, n_layers: int, name: str, kind: TensorType
) -> list[MetadataEntry]:
    """Return what every engine reads: architecture, sizes, type."""
    integers = {
        "vocab_size": shape.n_vocab,
        "context_length": shape.n_ctx,
        "embedding_length": shape.n_embd,
        "block_count": n_layers,
        "feed_forward_length": shape.n_ff,
        "rope.dimension_count": shape.head_dim,
        "attention.head_count": shape.n_heads,
        "attention.head_count_kv": shape.n_kv_heads,
    }
    floats = {
        "rope.freq_base": shape.rope_theta,
        "attention.layer_norm_rms_epsilon": _RMS_EPS,
    }
    return [
        _text("general.architecture", "llama"),
        _text("general.type", "model"),
        _text("general.name", name),
        _integer("general.quantization_version", gguf.GGML_QUANT_VERSION),
        _integer("general.file_type", _file_type(kind)),
        *(_integer(f"llama.{key}", value) for key, value in integers.items()),
        *(MetadataEntry(f"llama.{key}", ValueType.FLOAT32, v) for key, v in floats.items()),
    ]


def tokenizer_keys(n_vocab: int) -> list[MetadataEntry]:
    """Return a SentencePiece vocabulary of the bytes and a space; the other ids are unused."""
    types = dict(_SPECIAL)
    types |= {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}
    types[SPACE] = TokenType.NORMAL
    types |= {padding_name(i): TokenType.UNUSED for i in range(len(types), n_vocab)}
    return [
        _text(TokenizerKey.MODEL, TokenizerModel.SENTENCEPIECE_BPE),
        _text(TokenizerKey.PRE, "default"),
        _array(TokenizerKey.TOKENS, list(types), ValueType.STRING),
        _array(TokenizerKey.SCORES, [0.0] * n_vocab, ValueType.FLOAT32),
        _array(TokenizerKey.TOKEN_TYPE, list(map(int, types.values())), ValueType.INT32),
        *(
            _integer(key, token_id)
            for token_id, key in enumerate(
                (TokenizerKey.UNK_ID, TokenizerKey.BOS_ID, TokenizerKey.EOS_ID)
            )
        ),
        MetadataEntry(TokenizerKey.ADD_BOS, ValueType.BOOL, True),
    ]


def ffn_keys(firing: Firing, n_layers: int, *, dense_twin: bool) -> list[MetadataEntry]:
    """Return what the file says of its FFN; the twin is a SiLU model, which other engines compute rightly."""
    activation = Activation.SILU if dense_twin else Activation.RELU
    modes = ["dense"] if dense_twin else ["dense", "exact", "predicted"]
    keys = [
        _integer(Key.FORMAT_VERSION, FORMAT_VERSION),
        _text(Key.ACTIVATION, activation),
        _text(Key.NEURON_ORDER, NeuronOrder.HOT_FIRST),
        _array(Key.FFN_MODES, modes, ValueType.STRING),
    ]
    if dense_twin:
        return keys
    curves = np.tile(coverage_curves(firing.rates[None]), (n_layers, 1))
    unions = np.tile(firing.union_density(), n_layers)
    return [
        *keys,
        _text(Key.DIALECT, Dialect.EXTENDED),
        MetadataEntry(Key.ACTIVATION_THRESHOLD, ValueType.FLOAT32, 0.0),
        MetadataEntry(Key.SPARSE_THRESHOLD, ValueType.FLOAT32, 0.0),
        _integer(Key.SINK_POSITIONS, 1),
        _text(Key.PREDICTOR_KIND, "mlp"),
        _text(Key.PREDICTOR_TARGET, "engineered from the gate's weights"),
        MetadataEntry(Key.PREDICTOR_DENSITY, ValueType.FLOAT32, firing.predicted_density),
        _array(Key.STATISTICS_COVERAGE, curves.reshape(-1).tolist(), ValueType.FLOAT32),
        _array(Key.STATISTICS_DENSITY, [firing.density] * n_layers, ValueType.FLOAT32),
        _array(Key.STATISTICS_UNION_DENSITY, unions.tolist(), ValueType.FLOAT32),
    ]


def origin_keys(shape: SynthShape, manifest: Manifest) -> list[MetadataEntry]:
    """Return the keys that call the model synthetic and say how it was made."""
    return [_text(Key.SYNTHETIC, shape.name), _text(Key.MANIFEST, manifest.to_json())]


def _file_type(kind: TensorType) -> int:
    """Return llama.cpp's number for a file whose matrices have one type."""
    name = "ALL_F32" if kind is TensorType.F32 else f"MOSTLY_{kind.name}"
    found = gguf.LlamaFileType
    return int(found[name] if name in found.__members__ else found[f"{name}_S"])


def _text(name: str, value: str) -> MetadataEntry:
    return MetadataEntry(name, ValueType.STRING, str(value))


def _integer(name: str, value: int) -> MetadataEntry:
    return MetadataEntry(name, ValueType.UINT32, value)


def _array(name: str, values: Sequence[object], element_type: ValueType) -> MetadataEntry:
    return MetadataEntry(name, ValueType.ARRAY, values, element_type)
