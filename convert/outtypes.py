"""What --outtype means: which type each matrix takes, by one table.

The names up to q8_0 and iq4_nl give every matrix that type. The names with _s and _m, q2_k and q6_k are
llama.cpp's mixtures (its llama-quant.cpp, of 2026): the matrices that matter most take a higher type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from gguf import LlamaFileType

from powerinfer_toolkit.convert.config import ModelConfig
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Tensor, TensorType
from powerinfer_toolkit.gguf_types import block_elements


class OutType(StrEnum):
    """Names of --outtype."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q5_1 = "q5_1"
    Q5_0 = "q5_0"
    Q4_1 = "q4_1"
    Q4_0 = "q4_0"
    IQ4_NL = "iq4_nl"
    Q5_K = "q5_k"
    Q4_K = "q4_k"
    Q3_K = "q3_k"
    Q6_K = "q6_k"
    Q5_K_M = "q5_k_m"
    Q5_K_S = "q5_k_s"
    Q4_K_M = "q4_k_m"
    Q4_K_S = "q4_k_s"
    Q3_K_M = "q3_k_m"
    Q2_K = "q2_k"


Where = Callable[[ModelConfig, int], bool]  # of a model and a layer of it
Rule = tuple[tuple[TensorType, Where], ...]


@dataclass(frozen=True)
class Recipe:
    """One output type: the first rule of a tensor's template that holds decides, else `base`."""

    base: TensorType
    file_type: LlamaFileType
    rules: dict[str, Rule] = field(default_factory=dict)

    def types_of(self, template: str) -> set[TensorType]:
        """Return every type that the tensors of a template may take."""
        return {self.base, *(tensor_type for tensor_type, _ in self.rules.get(template, ()))}


class Choice(NamedTuple):
    """The type of a matrix; `wanted` is another one where its rows are no whole number of blocks."""

    type: TensorType
    wanted: TensorType


def _everywhere(_config: ModelConfig, _layer: int) -> bool:
    return True


def _more_bits(config: ModelConfig, layer: int) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    eighth = config.n_layers // 8
    return layer < eighth or layer >= 7 * config.n_layers // 8 or (layer - eighth) % 3 == 2


def _first(n_layers: int) -> Where:
    return lambda _config, layer: layer < n_layers


def _first_share(divisor: int) -> Where:
    return lambda config, layer: layer < config.n_layers // divisor


def _tied(config: ModelConfig, _layer: int) -> bool:
    return config.tied_embeddings


def _four_heads_share(config: ModelConfig, _layer: int) -> bool:
    return config.n_heads // config.n_kv_heads >= 4


def _is_70b(config: ModelConfig, _layer: int) -> bool:
    """Llama 2 and 3 of 70B, whose small attn_v serves eight heads."""
    return config.n_layers == 80 and config.n_heads != config.n_kv_heads


def _uniform(tensor_type: TensorType, file_type: LlamaFileType) -> Recipe:
    """One type throughout, but below 8 bits the embeddings, which are read a row at a time, in Q8_0."""
    q8_0 = ((TensorType.Q8_0, _everywhere),)
    return Recipe(tensor_type, file_type, {Tensor.TOKEN_EMBD: q8_0, Tensor.OUTPUT: q8_0})


def _mixture(
    base: TensorType,
    file_type: LlamaFileType,
    attn_v: Rule = (),
    attn_output: Rule = (),
    ffn_down: Rule = (),
) -> Recipe:
    """llama.cpp's: the head in Q6_K, which is the embedding where they are tied, and the rules given."""
    rules = {
        Tensor.TOKEN_EMBD: ((TensorType.Q6_K, _tied),),
        Tensor.OUTPUT: ((TensorType.Q6_K, _everywhere),),
        Tensor.ATTN_V: attn_v,
        Tensor.ATTN_OUTPUT: attn_output,
        Tensor.FFN_DOWN: ffn_down,
    }
    return Recipe(base, file_type, rules)


_RECIPES = {
    OutType.F32: Recipe(TensorType.F32, LlamaFileType.ALL_F32),
    OutType.F16: Recipe(TensorType.F16, LlamaFileType.MOSTLY_F16),
    OutType.BF16: Recipe(TensorType.BF16, LlamaFileType.MOSTLY_BF16),
    OutType.Q8_0: Recipe(TensorType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    OutType.Q5_1: _uniform(TensorType.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    OutType.Q5_0: _uniform(TensorType.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    OutType.Q4_1: _uniform(TensorType.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    OutType.Q4_0: _uniform(TensorType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    OutType.IQ4_NL: _uniform(TensorType.IQ4_NL, LlamaFileType.MOSTLY_IQ4_NL),
    OutType.Q5_K: _uniform(TensorType.Q5_K, LlamaFileType.MOSTLY_Q5_K_S),
    OutType.Q4_K: _uniform(TensorType.Q4_K, LlamaFileType.MOSTLY_Q4_K_S),
    OutType.Q3_K: _uniform(TensorType.Q3_K, LlamaFileType.MOSTLY_Q3_K_S),
    OutType.Q6_K: _mixture(TensorType.Q6_K, LlamaFileType.MOSTLY_Q6_K),
    OutType.Q5_K_M: _mixture(
        TensorType.Q5_K,
        LlamaFileType.MOSTLY_Q5_K_M,
        attn_v=((TensorType.Q6_K, _more_bits),),
        ffn_down=((TensorType.Q6_K, _more_bits),),
    ),
    OutType.Q5_K_S: _mixture(TensorType.Q5_K, LlamaFileType.MOSTLY_Q5_K_S),
    OutType.Q4_K_M: _mixture(
        TensorType.Q4_K,
        LlamaFileType.MOSTLY_Q4_K_M,
        attn_v=((TensorType.Q6_K, _more_bits), (TensorType.Q5_K, _is_70b)),
        ffn_down=((TensorType.Q6_K, _more_bits),),
    ),
    OutType.Q4_K_S: _mixture(
        TensorType.Q4_K,
        LlamaFileType.MOSTLY_Q4_K_S,
        attn_v=((TensorType.Q5_K, _first(4)), (TensorType.Q5_K, _is_70b)),
        ffn_down=((TensorType.Q5_K, _first_share(8)),),
    ),
    OutType.Q3_K_M: _mixture(
        TensorType.Q3_K,
        LlamaFileType.MOSTLY_Q3_K_M,
        attn_v=(
            (TensorType.Q5_K, _first(2)),
            (TensorType.Q5_K, _is_70b),
            (TensorType.Q4_K, _everywhere),
        ),
        attn_output=((TensorType.Q4_K, _everywhere),),
        ffn_down=((TensorType.Q5_K, _first_share(16)), (TensorType.Q4_K, _everywhere)),
    ),
    OutType.Q2_K: _mixture(
        TensorType.Q2_K,
        LlamaFileType.MOSTLY_Q2_K,
        attn_v=(
            (TensorType.Q5_K, _is_70b),
            (TensorType.Q4_K, _four_heads_share),
            (TensorType.Q3_K, _everywhere),
        ),
        attn_output=((TensorType.Q3_K, _everywhere),),
        ffn_down=((TensorType.Q3_K, _everywhere),),
    ),
}
# What takes the place of a type with blocks of 256 where rows are no multiple of that: blocks of 32.
_FALLBACKS = {
    TensorType.Q2_K: TensorType.Q4_0,
    TensorType.Q3_K: TensorType.Q4_0,
    TensorType.Q4_K: TensorType.Q5_0,
    TensorType.Q5_K: TensorType.Q5_1,
    TensorType.Q6_K: TensorType.Q8_0,
}


def recipe(outtype: OutType) -> Recipe:
    """Return the row of the table."""
    return _RECIPES[outtype]


def wanted_type(
    outtype: OutType, config: ModelConfig, template: str, layer: int | None
) -> TensorType:
    """Return the type of a matrix by the table, whatever the length of its rows.

    ffn_down_t follows the rule of ffn_down.
    """
    found = _RECIPES[outtype]
    template = Tensor.FFN_DOWN if template == Tensor.FFN_DOWN_T else template
    for tensor_type, holds in found.rules.get(template, ()):
        if holds(config, layer or 0):
            return tensor_type
    return found.base


def fitting_type(name: str, wanted: TensorType, n_columns: int) -> Choice:
    """Return the type that rows of `n_columns` can have: `wanted`, or what llama.cpp takes instead.

    Types with blocks of 256 have a replacement; for the others rows of no whole blocks are a PiError.
    """
    if n_columns % block_elements(wanted) == 0:
        return Choice(wanted, wanted)
    if wanted not in _FALLBACKS:
        raise PiError(
            f"{name} has rows of {n_columns} elements; {wanted.name} needs a multiple of "
            f"{block_elements(wanted)}",
            hint="--outtype f16 or bf16 takes any size",
        )
    fallback = _FALLBACKS[wanted]
    fits = n_columns % block_elements(fallback) == 0
    return Choice(fallback if fits else TensorType.F16, wanted)
