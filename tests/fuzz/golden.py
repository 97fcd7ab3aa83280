"""Complete models of less than 60 kB, one for each kind of file, for the fuzz tests to damage.

python golden.py FOLDER writes them all; see runtime/native/tests/mutate_gguf.cpp.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Kind

from parity.encode import encode
from parity.gguf_file import patch_magic
from parity.synthetic import Shape, TypeOf, Weights, dense_layout, random_weights, uniform

MAX_BYTES = 60_000
# Wide enough for blocks of 32 in every row, and no wider.
SHAPE = Shape(
    n_layers=2, n_embd=32, n_ff=40, n_heads=2, n_kv_heads=1, head_dim=16, n_vocab=48, n_ctx=64
)
PREDICTORS = Shape(**{**vars(SHAPE), "ranks": (32, 32)})
# What the runtime reads of a sparse file, and one key of every other type.
SPARSE_KEYS: dict[str, Any] = {
    "powerinfer.format_version": 1,
    "powerinfer.dialect": "extended",
    "powerinfer.activation": "relu",
    "powerinfer.activation_threshold": 0.01,
    "powerinfer.sparse_threshold": -0.5,
    "powerinfer.sink_positions": 1,
    "powerinfer.predictor.kind": "mlp",
    "powerinfer.predictor.exact_layers": [False, True],
    "powerinfer.predictor.perplexity_loss": 0.005,
    "powerinfer.statistics.density": [0.25, 0.5],
    "powerinfer.ffn_modes": ["dense", "exact", "predicted"],
}


def write_all(folder: Path) -> list[Path]:
    """Writes every golden file and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    writers: dict[str, Callable[[Path], None]] = {
        "upstream": _write_upstream,
        "extended": _write_extended,
        "dense": _write_dense,
    }
    paths = [folder / f"{name}.gguf" for name in writers]
    for path, write in zip(paths, writers.values(), strict=True):
        write(path)
        assert path.stat().st_size < MAX_BYTES
    return paths


def _write_upstream(path: Path) -> None:
    shape = Shape(**{**vars(PREDICTORS), "n_kv_heads": SHAPE.n_heads})
    keys = {"powerinfer.sparse_threshold": 0.25}
    _write(path, shape, random_weights(shape, 0), uniform(Type.F16), keys)
    patch_magic(path, b"PWRI")


def _write_extended(path: Path) -> None:
    types = {
        "attn": Type.Q8_0,
        "gate": Type.Q5_0,
        "up": Type.Q5_1,
        "down": Type.IQ4_NL,
        "fc1": Type.F16,
        "fc2": Type.F32,
        "token": Type.BF16,
    }
    weights = random_weights(PREDICTORS, 1)
    weights["rope_freqs.weight"] = np.linspace(1, 2, SHAPE.head_dim // 2, dtype=np.float32)

    def type_of(name: str) -> Type:
        return next((t for part, t in types.items() if part in name), Type.Q4_0)

    _write(path, PREDICTORS, weights, type_of, SPARSE_KEYS)


def _write_dense(path: Path) -> None:
    """As llama.cpp's converter writes it: tied embeddings, biases, linear rope scaling."""
    shape = Shape(**{**vars(SHAPE), "tied": True, "n_ff": 64})
    weights = dense_layout(random_weights(shape, 2))
    for layer in range(shape.n_layers):
        weights[f"blk.{layer}.attn_q.bias"] = np.ones(SHAPE.n_embd, dtype=np.float32)
    keys = {
        "general.alignment": 64,
        "llama.rope.freq_base": 500000.0,
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
        "llama.attention.sliding_window": 48,
        "llama.attention.scale": 0.25,
        "llama.logit_scale": (Kind.FLOAT64, 1.0),
        "llama.attention.causal": True,
        "llama.expert_count": (Kind.UINT8, 0),
        "powerinfer.format_version": (Kind.INT8, 1),
        "powerinfer.sink_positions": (Kind.INT16, 1),
        "split.count": (Kind.UINT16, 1),
        "general.file_type": (Kind.UINT64, 3),
    }
    _write(path, shape, weights, uniform(Type.Q4_1), keys)


def _write(
    path: Path, shape: Shape, weights: Weights, type_of: TypeOf, keys: dict[str, Any]
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.data_alignment = keys.get("general.alignment", writer.data_alignment)
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    _write_vocabulary(writer, shape.n_vocab)
    for name, value in keys.items():
        _write_key(writer, name, value)
    for name, values in weights.items():
        kind = type_of(name) if values.ndim == 2 else Type.F32
        writer.add_tensor(name, encode(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer: gguf.GGUFWriter, n_vocab: int) -> None:
    """Byte-level BPE with the bytes of lower-case words only."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "\u0120"]
    merges = ["t h", "th e", "i n", "\u0120 the"]
    tokens = ["<s>", "</s>", *letters, *(merge.replace(" ", "") for merge in merges)]
    tokens += [f"<pad{i}>" for i in range(n_vocab - len(tokens))]
    control = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control, control, *[gguf.TokenType.NORMAL] * (n_vocab - 2)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


def _write_key(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    """The type of a value follows from Python's, unless it is given: (type, value)."""
    if isinstance(value, tuple):
        return writer.add_key_value(name, value[1], value[0])
    kinds = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    return kinds[type(value)](name, value)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
