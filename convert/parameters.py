"""The parameters that a checkpoint must have, by the architecture table, checked against what it has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from powerinfer_toolkit.convert.config import ModelConfig
from powerinfer_toolkit.convert.elements import WEIGHT_DTYPES, Entry
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Tensor

# Buffers that old checkpoints carry; the frequencies follow from config.json.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Parameter:
    """One Hugging Face parameter: its name, GGUF name template, layer (None: global), shape (numpy order)."""

    hf_name: str
    template: str
    layer: int | None
    shape: tuple[int, ...]


def expected_parameters(config: ModelConfig) -> list[Parameter]:
    """Return every parameter of the model in file order: the global ones, then layer by layer."""
    shapes = _shapes(config)
    wanted = {
        hf_name: template
        for hf_name, template in config.arch.tensors.items()
        if _is_wanted(config, template)
    }
    parameters = [
        Parameter(hf_name, template, None, shapes[template])
        for hf_name, template in wanted.items()
        if "{i}" not in template
    ]
    for layer in range(config.n_layers):
        parameters += [
            Parameter(hf_name.format(i=layer), template, layer, shapes[template])
            for hf_name, template in wanted.items()
            if "{i}" in template
        ]
    return parameters


def _is_wanted(config: ModelConfig, template: str) -> bool:
    if template == Tensor.OUTPUT:
        return not config.tied_embeddings
    return config.attention_bias or not template.endswith(".bias")


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """GGUF name template -> shape in numpy order [out, in]."""
    n_embd, n_ff = config.n_embd, config.n_ff
    n_q = config.n_heads * config.head_dim
    n_kv = config.n_kv_heads * config.head_dim
    return {
        Tensor.TOKEN_EMBD: (config.n_vocab, n_embd),
        Tensor.OUTPUT_NORM: (n_embd,),
        Tensor.OUTPUT: (config.n_vocab, n_embd),
        Tensor.ATTN_NORM: (n_embd,),
        Tensor.ATTN_Q: (n_q, n_embd),
        Tensor.ATTN_K: (n_kv, n_embd),
        Tensor.ATTN_V: (n_kv, n_embd),
        Tensor.ATTN_OUTPUT: (n_embd, n_q),
        Tensor.ATTN_Q_BIAS: (n_q,),
        Tensor.ATTN_K_BIAS: (n_kv,),
        Tensor.ATTN_V_BIAS: (n_kv,),
        Tensor.ATTN_OUTPUT_BIAS: (n_embd,),
        Tensor.FFN_NORM: (n_embd,),
        Tensor.FFN_GATE: (n_ff, n_embd),
        Tensor.FFN_UP: (n_ff, n_embd),
        Tensor.FFN_DOWN: (n_embd, n_ff),
    }


def check_parameters(
    parameters: list[Parameter], entries: dict[str, Entry], config: ModelConfig
) -> None:
    """Compare what the model needs with what the checkpoint has.

    Raises PiError for a missing tensor, another shape, a type that holds no plain weights, and a tensor
    that would be lost.
    """
    for parameter in parameters:
        entry = entries.get(parameter.hf_name)
        if entry is None:
            raise PiError(
                f"the checkpoint lacks {parameter.hf_name}",
                hint="does config.json belong to these weights?",
            )
        if entry.shape != parameter.shape:
            raise PiError(
                f"{parameter.hf_name} has shape {list(entry.shape)}; config.json says "
                f"{list(parameter.shape)}",
                hint="does config.json belong to these weights?",
            )
        if entry.dtype not in WEIGHT_DTYPES:
            raise PiError(
                f"{parameter.hf_name} has the type {entry.dtype}",
                hint=f"supported: unquantised weights in {', '.join(WEIGHT_DTYPES)}",
            )
    lost = sorted(_lost(parameters, entries, config))
    if lost:
        raise PiError(
            f"the checkpoint holds {len(lost)} tensors that the model does not use: {', '.join(lost[:5])}",
            hint="converting would drop them; does config.json belong to these weights?",
        )


def _lost(
    parameters: list[Parameter], entries: dict[str, Entry], config: ModelConfig
) -> Iterator[str]:
    """Yield the tensors left over, but for rotary buffers and the head that a tied model repeats."""
    used = {parameter.hf_name for parameter in parameters}
    for name in entries:
        repeated_head = config.tied_embeddings and name == "lm_head.weight"
        if name not in used and not repeated_head and not _IGNORED.fullmatch(name):
            yield name
