"""GGUF keys -> hyper-parameters, checked."""

from __future__ import annotations

import math

from powerinfer_toolkit.arch import ARCHITECTURES, Architecture
from powerinfer_toolkit.convert.config import ModelConfig, Rope, RopeKind
from powerinfer_toolkit.convert.fields import Fields
from powerinfer_toolkit.convert.gguf_file import GgufFile, damaged
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.gguf_format import FORMAT_VERSION, PWRI_MAGIC, Activation, Key, Tensor


def read_gguf_config(file: GgufFile, stated: Activation | None) -> ModelConfig:
    """Return the configuration of a model file; `stated` is the activation that the user names.

    Raises PiError for what cannot be converted.
    """
    arch = _architecture(file)
    _check_format(file)
    prefix = f"{arch.gguf_name}."
    values = {
        name.removeprefix(prefix): key for name, key in file.keys.items() if name.startswith(prefix)
    }
    fields = Fields({name: key.value() for name, key in values.items()}, file.path)
    _refuse_what_is_not_modelled(fields)
    n_embd, n_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(n_embd // n_heads, 1))
    _check_attention(fields, head_dim)
    return ModelConfig(
        arch=arch,
        n_layers=fields.integer("block_count", most=4096),
        n_embd=n_embd,
        n_ff=fields.integer("feed_forward_length"),
        n_vocab=_vocabulary(file),
        n_heads=n_heads,
        n_kv_heads=_kv_heads(fields, n_heads),
        head_dim=head_dim,
        n_ctx=fields.integer("context_length", most=1 << 31),
        rms_eps=fields.positive("attention.layer_norm_rms_epsilon"),
        activation=_activation(file, stated),
        attention_bias=_has(file, Tensor.ATTN_Q_BIAS),
        tied_embeddings=not _has(file, Tensor.OUTPUT),
        sliding_window=_sliding_window(fields),
        rope=_rope(file, fields),
        activation_threshold=number(file, Key.ACTIVATION_THRESHOLD, 0.0),
    )


def number(file: GgufFile, name: str, default: float) -> float:
    """Return a key that holds a finite number."""
    value = file.value(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise damaged(file.path, f"key {name} is {value!r:.40}, not a finite number")
    return float(value)


def is_sparse(file: GgufFile) -> bool:
    """Return whether down is stored transposed, a row for each neuron."""
    return _has(file, Tensor.FFN_DOWN_T)


def _has(file: GgufFile, template: str) -> bool:
    return template.format(i=0) in file.entries


def _architecture(file: GgufFile) -> Architecture:
    name = file.value("general.architecture")
    for arch in ARCHITECTURES:
        if name == arch.gguf_name:
            return arch
    raise PiError(
        f"{file.path}: architecture {name!r:.80} is not supported",
        hint=f"supported: {', '.join(arch.gguf_name for arch in ARCHITECTURES)}",
    )


def _check_format(file: GgufFile) -> None:
    version = file.value(Key.FORMAT_VERSION, FORMAT_VERSION)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise PiError(
            f"{file.path} has PowerInfer format version {version!r:.40}; this version reads up to "
            f"{FORMAT_VERSION}",
            hint="update powerinfer-toolkit",
        )
    n_parts = file.value("split.count", 1)
    if n_parts != 1:
        raise PiError(
            f"{file.path} is one of {n_parts!r:.40} parts of a model",
            hint="join the parts first, with llama.cpp's llama-gguf-split --merge",
        )


def _refuse_what_is_not_modelled(fields: Fields) -> None:
    if fields.get("expert_count"):
        raise PiError(
            f"{fields.path}: a mixture of experts is not supported", hint="take a dense model"
        )


def _check_attention(fields: Fields, head_dim: int) -> None:
    if fields.integer("attention.value_length", head_dim) != head_dim or head_dim % 2:
        raise fields.error(f"heads of {head_dim} elements, with values of another length or odd")
    if fields.integer("rope.dimension_count", head_dim) != head_dim:
        raise PiError(
            f"{fields.path}: a partial rotary embedding is not supported",
            hint="supported: rotary embedding of whole heads",
        )


def _kv_heads(fields: Fields, n_heads: int) -> int:
    n_kv_heads = fields.integer("attention.head_count_kv", n_heads)
    if n_heads % n_kv_heads:
        raise fields.error(f"{n_heads} heads cannot share {n_kv_heads} key-value heads evenly")
    return n_kv_heads


def _vocabulary(file: GgufFile) -> int:
    entry = file.entries.get(Tensor.TOKEN_EMBD)
    if entry is None:
        raise PiError(f"{file.path} lacks {Tensor.TOKEN_EMBD}", hint="is this a whole model?")
    return entry.shape[0]


def _activation(file: GgufFile, stated: Activation | None) -> Activation:
    """Return the function on the gate: the file's word, the user's, or what its kind of file implies."""
    named = file.value(Key.ACTIVATION)
    if named is None and file.magic == PWRI_MAGIC:
        named = Activation.RELU
    if named is not None and named not in list(Activation):
        raise PiError(
            f"{file.path}: {Key.ACTIVATION} is {named!r:.80}",
            hint=f"known: {', '.join(Activation)}; a newer toolkit may read this file",
        )
    if named is not None and stated not in (None, named):
        raise UsageError(
            f"--hidden-act {stated}: the file says {named}", hint="leave --hidden-act out"
        )
    if named is None and stated is None and is_sparse(file):
        raise PiError(
            f"{file.path} stores ffn_down_t but no key {Key.ACTIVATION}",
            hint="say which function the model was trained with: --hidden-act relu or silu",
        )
    return Activation(named or stated or Activation.SILU)


def _sliding_window(fields: Fields) -> int:
    window = fields.get("attention.sliding_window")
    return fields.integer("attention.sliding_window", most=1 << 31) if window else 0


def _rope(file: GgufFile, fields: Fields) -> Rope:
    theta = fields.positive("rope.freq_base", 10000.0)
    kind = fields.get("rope.scaling.type") or "none"
    if kind not in ("none", "linear"):
        raise PiError(
            f"{file.path}: rope scaling {kind!r:.80} is not supported",
            hint="supported: none, linear, and llama3's factors (tensor rope_freqs.weight)",
        )
    if Tensor.ROPE_FREQS in file.entries:
        return Rope(theta, RopeKind.LLAMA3)
    if kind == "linear":
        return Rope(theta, RopeKind.LINEAR, fields.positive("rope.scaling.factor"))
    return Rope(theta)
