"""The architectures that can be converted: Hugging Face names on one side, GGUF names on the other."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer_toolkit.gguf_format import Activation, Tensor


@dataclass(frozen=True)
class Architecture:
    """One family of decoder blocks.

    `tensors` maps Hugging Face parameter names to GGUF names; `{i}` is the layer. `rope_permuted` lists
    the GGUF names whose rows go from Hugging Face's split-half rope order to interleaved pairs.
    """

    gguf_name: str
    hf_architectures: tuple[str, ...]
    activations: dict[str, Activation]
    tensors: dict[str, str]
    rope_permuted: tuple[str, ...]


LLAMA = Architecture(
    gguf_name="llama",
    hf_architectures=("LlamaForCausalLM", "MistralForCausalLM"),
    activations={"silu": Activation.SILU, "swish": Activation.SILU, "relu": Activation.RELU},
    tensors={
        "model.embed_tokens.weight": Tensor.TOKEN_EMBD,
        "model.norm.weight": Tensor.OUTPUT_NORM,
        "lm_head.weight": Tensor.OUTPUT,
        "model.layers.{i}.input_layernorm.weight": Tensor.ATTN_NORM,
        "model.layers.{i}.self_attn.q_proj.weight": Tensor.ATTN_Q,
        "model.layers.{i}.self_attn.k_proj.weight": Tensor.ATTN_K,
        "model.layers.{i}.self_attn.v_proj.weight": Tensor.ATTN_V,
        "model.layers.{i}.self_attn.o_proj.weight": Tensor.ATTN_OUTPUT,
        "model.layers.{i}.self_attn.q_proj.bias": Tensor.ATTN_Q_BIAS,
        "model.layers.{i}.self_attn.k_proj.bias": Tensor.ATTN_K_BIAS,
        "model.layers.{i}.self_attn.v_proj.bias": Tensor.ATTN_V_BIAS,
        "model.layers.{i}.self_attn.o_proj.bias": Tensor.ATTN_OUTPUT_BIAS,
        "model.layers.{i}.post_attention_layernorm.weight": Tensor.FFN_NORM,
        "model.layers.{i}.mlp.gate_proj.weight": Tensor.FFN_GATE,
        "model.layers.{i}.mlp.up_proj.weight": Tensor.FFN_UP,
        "model.layers.{i}.mlp.down_proj.weight": Tensor.FFN_DOWN,
    },
    rope_permuted=(Tensor.ATTN_Q, Tensor.ATTN_K, Tensor.ATTN_Q_BIAS, Tensor.ATTN_K_BIAS),
)

ARCHITECTURES = (LLAMA,)
