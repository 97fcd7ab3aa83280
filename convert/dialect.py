"""Which layout a model is written in: dense, upstream's dialect wherever upstream runs it correctly, or ours."""

from __future__ import annotations

from typing import Literal

from powerinfer_toolkit.convert.config import ModelConfig, RopeKind
from powerinfer_toolkit.convert.source import Source
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import MIN_UPSTREAM_N_FF, Activation, Dialect, TensorType
from powerinfer_toolkit.tokenizer_format import TokenizerModel

UPSTREAM_TYPES = {TensorType.F16, TensorType.Q4_0}
UPSTREAM_TOKENIZERS = (TokenizerModel.BYTE_LEVEL_BPE, TokenizerModel.SENTENCEPIECE_BPE)
DENSE: Literal["dense"] = "dense"
RequestedDialect = Dialect | Literal["dense"]


def choose_dialect(
    requested: RequestedDialect | None, source: Source, ffn_types: set[TensorType]
) -> Dialect | None:
    """Return the dialect, None for a plain dense file; `ffn_types` are to be those of gate, up and down.

    `requested` None keeps what a model file is, as far as upstream can run it. A SiLU checkpoint becomes a
    dense file, a ReLU model upstream's exactly when that engine computes the same function. Raises PiError
    when the requested one is impossible.
    """
    is_relu = source.config.activation is Activation.RELU
    obstacles = _upstream_obstacles(source.config, ffn_types, source.tokenizer)
    if requested == DENSE and is_relu:
        raise PiError(
            "a ReLU model is never written as a dense file: other engines would run it as SiLU",
            hint="--dialect extended or upstream",
        )
    if requested is Dialect.UPSTREAM and obstacles:
        raise PiError(
            f"upstream cannot run this: {'; '.join(obstacles)}",
            hint="--dialect extended can hold it",
        )
    if isinstance(requested, Dialect):
        return requested
    if requested == DENSE or (not is_relu and source.dialect is None):
        return None
    keeps_extended = source.dialect is Dialect.EXTENDED
    return Dialect.EXTENDED if obstacles or keeps_extended else Dialect.UPSTREAM


def _upstream_obstacles(
    config: ModelConfig, ffn_types: set[TensorType], tokenizer: TokenizerModel | None
) -> list[str]:
    """Return why upstream would refuse the model or run it wrongly; empty if it would not."""
    others = sorted(ffn_types - UPSTREAM_TYPES)
    rules = {
        f"it applies ReLU to the gate, not {config.activation}": config.activation
        is not Activation.RELU,
        f"it knows no activation threshold of {config.activation_threshold:g}": config.activation_threshold
        != 0,
        f"its sparse FFN is right in F16 and Q4_0 only, not {', '.join(t.name for t in others)}": bool(
            others
        ),
        f"n_ff {config.n_ff} is below {MIN_UPSTREAM_N_FF}, where it takes a faulty kernel": config.n_ff
        < MIN_UPSTREAM_N_FF,
        f"it knows no tokenizer of kind {tokenizer}": tokenizer not in UPSTREAM_TOKENIZERS,
        "it knows no llama3 rope scaling": config.rope.kind is RopeKind.LLAMA3,
        "it knows no attention biases": config.attention_bias,
        f"it needs head_dim {config.head_dim} = n_embd / n_heads": config.head_dim * config.n_heads
        != config.n_embd,
        f"it knows no sliding window of {config.sliding_window} tokens": 0
        < config.sliding_window
        < config.n_ctx,
    }
    return [reason for reason, holds in rules.items() if holds]
