"""What pi-profile can be told."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.settings import setting
from powerinfer_toolkit.training.sources import DataSource, check_seed, check_sources

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of one pass; docs/cli.md explains them."""

    dataset_mixture: list[DataSource] = setting([], "sources of text, see docs/training.md")
    eval_mixture: list[DataSource] = setting(
        [], "held-out sources, which are not counted; none: documents held out"
    )
    held_out_share: float = setting(0.01, "share of the documents that is left out, as in training")
    separator_token: str | None = setting(None, "token after a document; none: end of text")
    max_length: int = setting(1024, "tokens of a block; documents are packed into blocks")
    token_dir: str | None = setting(None, "where tokenised text is kept; none: OUT/tokens")
    seed: int = setting(0, "seed of the order")
    max_tokens: int | None = setting(None, "stop after so many tokens; default: all")
    trust_remote_code: bool = setting(
        False, "run modelling code that lies in the checkpoint's directory (dReLU models)"
    )
    per_device_batch_size: int = setting(16, "blocks that run at a time in every process")
    torch_dtype: str = setting(
        "auto",
        "arithmetic; auto is the checkpoint's own on a GPU, float32 elsewhere",
        choices=DTYPES,
    )
    save_steps: int = setting(
        100, "batches between two saves of what an interrupted run resumes from"
    )
    upstream: bool = setting(
        False, "also write OUT/activation/activation_<layer>.pt, which PowerInfer's solver reads"
    )

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant (UsageError)."""
        for name in ("max_length", "per_device_batch_size", "save_steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", hint="give 1 or more")
        check_sources(self.dataset_mixture, self.eval_mixture)
        check_seed(self.seed)
        if self.max_tokens is not None and self.max_tokens < self.max_length:
            raise UsageError(
                f"max_tokens {self.max_tokens} is less than a block of {self.max_length}",
                hint="raise max_tokens or lower max_length",
            )
