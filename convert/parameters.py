"""The tensors that a source must have, by the architecture table, checked against what it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from powerinfer_toolkit.convert.config import ModelConfig
from powerinfer_toolkit.convert.elements import Entry
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Tensor


@dataclass(frozen=True)
class Parameter:
    """One tensor of a source: its name there, GGUF name template, layer (None: global), shape as stored.

    Shapes are in numpy order. The template is FFN_DOWN_T where the source stores down transposed.
    """

    name: str
    template: str
    layer: int | None
    shape: tuple[int, ...]


def expected_parameters(config: ModelConfig, names: Mapping[str, str]) -> list[Parameter]:
    """Return every parameter of the model in file order: the global ones, then layer by layer.

    `names` maps GGUF name templates to the source's names; `{i}` is the layer.
    """
    shapes = _shapes(config)
    wanted = {template: name for template, name in names.items() if _is_wanted(config, template)}
    parameters = [
        Parameter(name, template, None, shapes[template])
        for template, name in wanted.items()
        if "{i}" not in template
    ]
    for layer in range(config.n_layers):
        parameters += [
            Parameter(name.format(i=layer), template, layer, shapes[template])
            for template, name in wanted.items()
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
        Tensor.ROPE_FREQS: (config.head_dim // 2,),
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
        Tensor.FFN_DOWN_T: (n_ff, n_embd),
    }


def check_parameters(
    parameters: list[Parameter],
    entries: Mapping[str, Entry],
    dtypes: tuple[str, ...],
    is_ignored: Callable[[str], bool],
    hint: str,
) -> None:
    """Compare what the model needs with what the source has.

    Raises PiError, with `hint` where shapes or names disagree, for a missing tensor, another shape, a type
    not among `dtypes`, and a tensor that would be lost, unless it is ignored on purpose.
    """
    for parameter in parameters:
        entry = entries.get(parameter.name)
        if entry is None:
            raise PiError(f"the source lacks {parameter.name}", hint=hint)
        if entry.shape != parameter.shape:
            raise PiError(
                f"{parameter.name} has shape {list(entry.shape)}; the model's sizes make it "
                f"{list(parameter.shape)}",
                hint=hint,
            )
        if entry.dtype not in dtypes:
            raise PiError(
                f"{parameter.name} has the type {entry.dtype}",
                hint=f"supported weights: {', '.join(dtypes)}",
            )
    used = {parameter.name for parameter in parameters}
    lost = sorted(name for name in entries if name not in used and not is_ignored(name))
    if lost:
        raise PiError(
            f"the source holds {len(lost)} tensors that the model does not use: {', '.join(lost[:5])}",
            hint=f"converting would drop them; {hint}",
        )
