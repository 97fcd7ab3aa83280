"""The shapes of published models that pi-bench synth can write."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer_toolkit.errors import UsageError

_MULTIPLE = 32  # of predictor ranks, so that fc2's rows are whole blocks


@dataclass(frozen=True)
class SynthShape:
    """Sizes of a Llama-family model, as in its config.json."""

    name: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    n_vocab: int
    n_ctx: int
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.n_embd // self.n_heads

    @property
    def predictor_rank(self) -> int:
        """The rank at which predictors have 8% of the FFN's parameters, rounded to whole blocks, at least 96."""
        n_ffn = 3 * self.n_embd * self.n_ff
        rank = 0.08 * n_ffn / (self.n_embd + self.n_ff)
        return max(3 * _MULTIPLE, round(rank / _MULTIPLE) * _MULTIPLE)


SHAPES = {
    shape.name: shape
    for shape in (
        SynthShape("tiny", 4, 512, 2048, 8, 4, 1024, 2048),  # no published model: for tests
        SynthShape("135m", 30, 576, 1536, 9, 3, 49152, 8192, 100000.0),  # SmolLM2-135M
        SynthShape("1b", 22, 2048, 5632, 32, 4, 32000, 2048),  # TinyLlama-1.1B
        SynthShape("7b", 32, 4096, 11008, 32, 32, 32000, 4096),  # Llama-2-7B
        SynthShape("mistral-7b", 32, 4096, 14336, 32, 8, 32000, 32768),
        SynthShape("8b", 32, 4096, 14336, 32, 8, 128256, 8192, 500000.0),  # Llama-3-8B
        SynthShape("13b", 40, 5120, 13824, 40, 40, 32000, 4096),  # Llama-2-13B
        SynthShape("70b", 80, 8192, 28672, 64, 8, 32000, 4096),  # Llama-2-70B
        # Falcon-40B's sizes as a gated Llama-family model: a third matrix of neurons, no parallel attention
        SynthShape("falcon-40b-gated", 60, 8192, 32768, 128, 8, 65024, 2048),
    )
}
# Shapes that users will ask for, and what of them the format and the engine lack.
NOT_YET = {
    "falcon-40b": "parallel attention and LayerNorm",  # falcon-40b-gated has its sizes
    "opt-30b": "learned positions and LayerNorm",
    "mixtral": "experts",
    "30b-a3b": "experts",
}


def find_shape(name: str) -> SynthShape:
    """Return a shape by its name; UsageError says which there are."""
    known = ", ".join(SHAPES)
    if name in NOT_YET:
        raise UsageError(
            f"shape {name} needs {NOT_YET[name]}, which this version does not run",
            hint=f"shapes: {known}",
        )
    if name not in SHAPES:
        raise UsageError(f"unknown shape {name!r}", hint=f"shapes: {known}")
    return SHAPES[name]
