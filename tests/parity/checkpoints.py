"""Tiny random transformers models, their checkpoints on disk, and their weights under GGUF names.

A test module that imports this one is skipped where torch or transformers is missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray

from parity.synthetic import Shape, Weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 293,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}

# name -> changes to TINY; "mistral" picks the class
CASES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied_mqa_72": {
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "vocab_size": 271,
    },
    "mha_264": {
        "hidden_size": 264,
        "intermediate_size": 1001,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "head_dim": {"intermediate_size": 1500, "num_attention_heads": 4, "head_dim": 32},
    "rope_linear": {"rope_parameters": LINEAR_ROPE},
    "rope_llama3": {"rope_parameters": LLAMA3_ROPE},
    "attention_bias": {"attention_bias": True, "tie_word_embeddings": True},
    "mistral_window": {"class": "mistral", "sliding_window": 9, "hidden_act": "relu"},
    "relu": {"hidden_act": "relu", "intermediate_size": 1500},
    "relu_blocks": {"hidden_act": "relu", "intermediate_size": 1056},
    "relu_odd": {
        "hidden_act": "relu",
        "hidden_size": 264,
        "intermediate_size": 1001,
        "head_dim": 22,
    },
}


def tiny_config(case: str) -> transformers.PretrainedConfig:
    values = TINY | CASES[case]
    if values.pop("class", "llama") == "mistral":
        return transformers.MistralConfig(**values)
    return transformers.LlamaConfig(**values)


def tiny_model(case: str, seed: int = 0) -> transformers.PreTrainedModel:
    """A float32 model with activations near 1, norms that are not flat and biases that are not 0."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        tiny_config(case), attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_like(name, parameter))
    return model


def _random_like(name: str, parameter: torch.Tensor) -> torch.Tensor:
    noise = torch.randn_like(parameter)
    if parameter.ndim == 1:
        return 0.3 * noise if name.endswith("bias") else 1 + 0.2 * noise
    return noise if "embed" in name else noise / parameter.shape[1] ** 0.5


def save_checkpoint(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """What save_pretrained writes, and a byte-level BPE tokenizer that fills the vocabulary."""
    model.save_pretrained(folder)
    write_bpe_tokenizer(folder, model.config.vocab_size)
    return folder


def load_checkpoint(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()


def write_bpe_tokenizer(folder: Path, n_vocab: int) -> None:
    """Three special tokens, the 256 bytes, then merges of byte pairs."""
    specials = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in "etaoin" for b in alphabet][: n_vocab - len(specials) - len(alphabet)]
    tokens = specials + alphabet + [a + b for a, b in merges]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def torch_logits(
    model: transformers.PreTrainedModel, tokens: list[int] | NDArray[np.integer]
) -> NDArray[np.floating]:
    """[n_tokens, n_vocab] in the model's own precision."""
    with torch.no_grad():
        return model(torch.as_tensor([list(tokens)])).logits[0].numpy()


def shape_of(config: transformers.PretrainedConfig) -> Shape:
    return Shape(
        n_layers=config.num_hidden_layers,
        n_embd=config.hidden_size,
        n_ff=config.intermediate_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        n_vocab=config.vocab_size,
        n_ctx=config.max_position_embeddings,
        tied=config.tie_word_embeddings,
    )


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_weights(model: transformers.PreTrainedModel) -> Weights:
    """Float32 weights in llama.cpp's conventions: dense layout, q and k rows as interleaved rope pairs."""
    weights: Weights = {}
    for name, values in model.state_dict().items():
        stem, kind = name.rsplit(".", 1)
        if stem == "lm_head" and model.config.tie_word_embeddings:
            continue
        layer, prefix = stem, ""
        if stem.startswith("model.layers."):
            _, _, index, layer = stem.split(".", 3)
            prefix = f"blk.{index}."
        array = values.float().numpy()
        if layer in ("self_attn.q_proj", "self_attn.k_proj"):
            array = interleave_rope(array, shape_of(model.config).head_dim)
        weights[f"{prefix}{GGUF_NAMES[layer]}.{kind}"] = array
    return weights


def interleave_rope(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows i and i + head_dim/2 of each head become neighbours. rows [n_heads * head_dim, ...]."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def rope_factors(model: transformers.PreTrainedModel) -> NDArray[np.float32]:
    """Plain rope frequencies over the model's own: GGUF's rope_freqs for llama3 scaling."""
    scaled = model.model.rotary_emb.inv_freq.numpy()
    theta = model.config.rope_parameters["rope_theta"]
    plain = theta ** -(np.arange(len(scaled)) / len(scaled))
    return (plain / scaled).astype(np.float32)
