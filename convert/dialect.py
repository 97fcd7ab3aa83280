"""Which dialect a ReLU model is written in: upstream's wherever upstream runs it correctly, else our own."""

from __future__ import annotations

from powerinfer_toolkit.convert.config import ModelConfig, RopeKind
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.gguf_format import MIN_UPSTREAM_N_FF, Activation, Dialect, TensorType
from powerinfer_toolkit.tokenizer_format import TokenizerModel

UPSTREAM_TYPES = (TensorType.F16, TensorType.Q4_0)
UPSTREAM_TOKENIZERS = (TokenizerModel.BYTE_LEVEL_BPE, TokenizerModel.SENTENCEPIECE_BPE)


def choose_dialect(
    requested: Dialect | None, config: ModelConfig, outtype: TensorType, tokenizer: TokenizerModel
) -> Dialect | None:
    """Return the dialect, None for a SiLU model, which becomes a plain dense file.

    `requested` None means: as design has it, upstream exactly when that engine computes the same function.
    Raises PiError when the requested one is impossible.
    """
    if config.activation is not Activation.RELU:
        if requested is not None:
            raise UsageError(
                "--dialect is for ReLU models; this one has SiLU and becomes a plain dense GGUF"
            )
        return None
    obstacles = _upstream_obstacles(config, outtype, tokenizer)
    if requested is Dialect.UPSTREAM and obstacles:
        raise PiError(
            f"upstream cannot run this: {'; '.join(obstacles)}",
            hint="--dialect extended can hold it",
        )
    if requested is None:
        return Dialect.EXTENDED if obstacles else Dialect.UPSTREAM
    return requested


def _upstream_obstacles(
    config: ModelConfig, outtype: TensorType, tokenizer: TokenizerModel
) -> list[str]:
    """Return why upstream would refuse the model or run it wrongly; empty if it would not."""
    rules = {
        f"its sparse FFN is right in F16 and Q4_0 only, not {outtype.name}": outtype
        not in UPSTREAM_TYPES,
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
