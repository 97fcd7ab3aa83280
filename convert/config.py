"""config.json -> hyper-parameters, checked; what cannot be converted is refused with what can.

Field names and defaults are transformers' (LlamaConfig, MistralConfig, modeling_rope_utils).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from powerinfer_toolkit.arch import ARCHITECTURES, Architecture
from powerinfer_toolkit.convert.fields import Fields
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Activation


class RopeKind(StrEnum):
    """How rotary frequencies are scaled, by transformers' rope_type."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base and scaling; the last three belong to LLAMA3 alone."""

    theta: float
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters of one model; `sliding_window` 0 means none.

    With ReLU a neuron fires where its gate is above `activation_threshold`.
    """

    arch: Architecture
    n_layers: int
    n_embd: int
    n_ff: int
    n_vocab: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_ctx: int
    rms_eps: float
    activation: Activation
    attention_bias: bool
    tied_embeddings: bool
    sliding_window: int
    rope: Rope
    activation_threshold: float = 0.0


def read_config(directory: Path) -> ModelConfig:
    """Return the configuration of the checkpoint in `directory`. Raises PiError."""
    path = directory / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as failure:
        raise PiError(
            f"{directory} has no config.json",
            hint="name the directory of a Hugging Face checkpoint",
        ) from failure
    except (ValueError, RecursionError) as failure:
        raise PiError(f"{path} is not JSON: {failure}", hint="get the file again") from failure
    if not isinstance(values, dict):
        raise PiError(f"{path} is not a JSON object", hint="get the file again")
    return _parse(Fields(values, path))


def _parse(fields: Fields) -> ModelConfig:
    hf_name, arch = _architecture(fields)
    _refuse_what_is_not_modelled(fields)
    mistral = hf_name == "MistralForCausalLM"
    n_embd = fields.integer("hidden_size")
    n_heads = fields.integer("num_attention_heads")
    return ModelConfig(
        arch=arch,
        n_layers=fields.integer("num_hidden_layers", most=4096),
        n_embd=n_embd,
        n_ff=fields.integer("intermediate_size"),
        n_vocab=fields.integer("vocab_size"),
        n_heads=n_heads,
        n_kv_heads=_kv_heads(fields, n_heads, default=8 if mistral else n_heads),
        head_dim=_head_dim(fields, n_embd, n_heads),
        n_ctx=fields.integer("max_position_embeddings", most=1 << 31),
        rms_eps=fields.positive("rms_norm_eps", 1e-6),
        activation=_activation(fields, arch),
        activation_threshold=_activation_threshold(fields, arch),
        attention_bias=fields.flag("attention_bias"),
        tied_embeddings=fields.flag("tie_word_embeddings"),
        sliding_window=_sliding_window(fields) if mistral else 0,
        rope=_rope(fields),
    )


def _unsupported(fields: Fields, what: str) -> PiError:
    names = ", ".join(name for arch in ARCHITECTURES for name in arch.hf_architectures)
    acts = ", ".join(sorted({name for arch in ARCHITECTURES for name in arch.activations}))
    return PiError(
        f"{fields.path}: {what} is not supported",
        hint=f"supported: {names} with hidden_act {acts}; rope scaling {', '.join(RopeKind)}; "
        "no MLP biases; unquantised weights (float64, float32, float16, bfloat16)",
    )


def _architecture(fields: Fields) -> tuple[str, Architecture]:
    """Return the class name that config.json gives and its entry in the architecture table."""
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise _unsupported(fields, f"architectures {names!r}")
    for arch in ARCHITECTURES:
        if names[0] in arch.hf_architectures:
            return names[0], arch
    raise _unsupported(fields, f"architecture {names[0]}")


def _refuse_what_is_not_modelled(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        raise _unsupported(fields, "a quantised checkpoint (quantization_config)")
    if fields.flag("mlp_bias"):
        raise _unsupported(fields, "mlp_bias")
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and len(set(map(str, kinds))) > 1:
        raise _unsupported(fields, "a mixture of attention kinds (layer_types)")


def _activation(fields: Fields, arch: Architecture) -> Activation:
    name = fields.get("hidden_act") or "silu"
    if name not in arch.activations:
        raise _unsupported(fields, f"hidden_act {name!r}")
    return arch.activations[name]


def _activation_threshold(fields: Fields, arch: Architecture) -> float:
    """FATReLU as pi-relufy saves it: hidden_act relu and this key, which transformers ignores."""
    if fields.get("activation_threshold") in (None, 0):
        return 0.0
    if _activation(fields, arch) is not Activation.RELU:
        raise fields.error("activation_threshold belongs to hidden_act relu")
    return fields.positive("activation_threshold")


def _kv_heads(fields: Fields, n_heads: int, default: int) -> int:
    n_kv_heads = fields.integer("num_key_value_heads", default)
    if n_heads % n_kv_heads:
        raise fields.error(f"{n_heads} heads cannot share {n_kv_heads} key-value heads evenly")
    return n_kv_heads


def _head_dim(fields: Fields, n_embd: int, n_heads: int) -> int:
    head_dim = fields.integer("head_dim", n_embd // n_heads)
    if fields.get("head_dim") is None and n_embd % n_heads:
        raise fields.error(f"hidden_size {n_embd} is no multiple of {n_heads} heads")
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    return head_dim


def _sliding_window(fields: Fields) -> int:
    """Mistral's window; where config.json does not mention it, the class default of transformers."""
    if fields.has("sliding_window") and fields.get("sliding_window") is None:
        return 0
    return fields.integer("sliding_window", 4096, most=1 << 31)


def _rope(fields: Fields) -> Rope:
    """Read rope_parameters (transformers 5) or rope_theta with rope_scaling (before)."""
    found = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise fields.error(f"rope parameters are {found!r:.80}, not an object")
    scaling = Fields(found, fields.path)
    kind = found.get("rope_type") or found.get("type") or RopeKind.DEFAULT
    theta = scaling.positive("rope_theta", fields.positive("rope_theta", 10000.0))
    rotated = scaling.positive(
        "partial_rotary_factor", fields.positive("partial_rotary_factor", 1.0)
    )
    if kind not in list(RopeKind):
        raise _unsupported(fields, f"rope scaling {kind!r}")
    if rotated != 1.0:
        raise _unsupported(fields, "a partial rotary embedding")
    if kind == RopeKind.DEFAULT:
        return Rope(theta)
    if kind == RopeKind.LINEAR:
        return Rope(theta, RopeKind.LINEAR, scaling.positive("factor"))
    return _llama3_rope(fields, scaling, theta)


def _llama3_rope(fields: Fields, scaling: Fields, theta: float) -> Rope:
    trained = fields.integer("max_position_embeddings", most=1 << 31)
    rope = Rope(
        theta,
        RopeKind.LLAMA3,
        scaling.positive("factor"),
        scaling.positive("low_freq_factor"),
        scaling.positive("high_freq_factor"),
        scaling.integer("original_max_position_embeddings", trained, most=1 << 31),
    )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise fields.error("rope high_freq_factor must be above low_freq_factor")
    return rope
