"""Synthetic Llama-family weights and GGUF files, written with gguf-py and none of the toolkit's code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from parity.encode import encode
from parity.gguf_file import patch_magic

Weights = dict[str, NDArray[np.float32]]  # by GGUF tensor name, matrices [n_rows, n_cols]
TypeOf = Callable[[str], Type]  # tensor name -> type of a matrix

N_BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
SPM_NORMAL, SPM_UNKNOWN, SPM_CONTROL, SPM_BYTE = 1, 2, 3, 6
FILE_TYPES = {Type.F32: 0, Type.F16: 1, Type.Q4_0: 2, Type.Q4_1: 3, Type.Q8_0: 7, Type.BF16: 32}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; `ranks` holds the predictor rank of each layer, or nothing."""

    n_layers: int = 2
    n_embd: int = 96
    n_ff: int = 160
    n_heads: int = 6
    n_kv_heads: int = 2
    head_dim: int = 16
    n_vocab: int = 293
    n_ctx: int = 512
    tied: bool = False
    ranks: tuple[int, ...] = ()


def random_weights(shape: Shape, seed: int) -> Weights:
    """Weights whose activations stay near 1 in every layer, with norms that are not flat."""
    rng = np.random.default_rng(seed)
    weights = {"token_embd.weight": _normal(rng, shape.n_vocab, shape.n_embd)}
    weights["output_norm.weight"] = _gain(rng, shape.n_embd)
    if not shape.tied:
        weights["output.weight"] = _matrix(rng, shape.n_vocab, shape.n_embd)
    for layer in range(shape.n_layers):
        for name, values in _layer_weights(shape, rng, layer).items():
            weights[f"blk.{layer}.{name}.weight"] = values
    return weights


def _layer_weights(shape: Shape, rng: np.random.Generator, layer: int) -> Weights:
    n_embd, n_q = shape.n_embd, shape.n_heads * shape.head_dim
    n_kv = shape.n_kv_heads * shape.head_dim
    weights = {
        "attn_norm": _gain(rng, n_embd),
        "attn_q": _matrix(rng, n_q, n_embd),
        "attn_k": _matrix(rng, n_kv, n_embd),
        "attn_v": _matrix(rng, n_kv, n_embd),
        "attn_output": _matrix(rng, n_embd, n_q),
        "ffn_norm": _gain(rng, n_embd),
        "ffn_gate": _matrix(rng, shape.n_ff, n_embd),
        "ffn_up": _matrix(rng, shape.n_ff, n_embd),
        "ffn_down_t": np.ascontiguousarray(_matrix(rng, n_embd, shape.n_ff).T),
    }
    if shape.ranks:
        weights["fc1"] = _matrix(rng, shape.ranks[layer], n_embd)
        weights["fc2"] = _matrix(rng, shape.n_ff, shape.ranks[layer])
    return weights


def _normal(rng: np.random.Generator, *sizes: int) -> NDArray[np.float32]:
    return rng.standard_normal(sizes, dtype=np.float32)


def _matrix(rng: np.random.Generator, n_rows: int, n_cols: int) -> NDArray[np.float32]:
    return _normal(rng, n_rows, n_cols) / np.float32(np.sqrt(n_cols))


def _gain(rng: np.random.Generator, n: int) -> NDArray[np.float32]:
    return 1 + np.float32(0.2) * _normal(rng, n)


def dense_layout(weights: Weights) -> Weights:
    """The same model with ffn_down in place of ffn_down_t."""
    return {
        name.replace("ffn_down_t", "ffn_down"): np.ascontiguousarray(values.T)
        if "ffn_down_t" in name
        else values
        for name, values in weights.items()
    }


def without_predictors(weights: Weights) -> Weights:
    return {name: w for name, w in weights.items() if ".fc1." not in name and ".fc2." not in name}


def all_float32(_name: str) -> Type:
    return Type.F32


def uniform(type_: Type) -> TypeOf:
    return lambda _name: type_


def write_gguf(
    path: Path,
    shape: Shape,
    weights: Weights,
    *,
    type_of: TypeOf = all_float32,
    keys: Mapping[str, Any] | None = None,
    n_rot: int | None = None,
    minimal: bool = False,
    magic: bytes = b"GGUF",
) -> Path:
    """Writes `weights`; vectors stay F32. `minimal` leaves out what upstream's loader does not need."""
    writer = gguf.GGUFWriter(path, "llama")
    _write_shape_keys(writer, shape, n_rot or shape.head_dim, minimal)
    write_spm_vocabulary(writer, shape.n_vocab)
    for name, value in (keys or {}).items():
        _write_key(writer, name, value)
    for name, values in weights.items():
        type_ = type_of(name) if values.ndim == 2 else Type.F32
        writer.add_tensor(name, encode(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    patch_magic(path, magic)
    return path


def _write_shape_keys(writer: gguf.GGUFWriter, shape: Shape, n_rot: int, minimal: bool) -> None:
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    if minimal and shape.n_kv_heads == shape.n_heads:
        return
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_rope_dimension_count(n_rot)
    if shape.head_dim * shape.n_heads != shape.n_embd:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)


def write_spm_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Three special tokens, the 256 bytes, then words."""
    n_words = n_vocab - len(SPECIAL_TOKENS) - N_BYTE_TOKENS
    words = [f"\u2581w{i}" for i in range(n_words)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*SPECIAL_TOKENS, *(f"<0x{b:02X}>" for b in range(256)), *words])
    writer.add_token_scores([0.0] * (n_vocab - n_words) + [-float(i) for i in range(n_words)])
    special = [SPM_UNKNOWN, SPM_CONTROL, SPM_CONTROL]
    writer.add_token_types(special + [SPM_BYTE] * N_BYTE_TOKENS + [SPM_NORMAL] * n_words)


def _write_key(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, list):
        writer.add_array(name, value)
    else:
        writer.add_uint32(name, value)
