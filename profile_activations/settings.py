"""What pi-profile can be told."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.settings import setting

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of one pass; docs/cli.md explains them."""

    data: list[str] = setting(
        [],
        "texts, in order: .txt, .jsonl, .parquet, .npy (token ids), or NAME[:CONFIGURATION] of the hub",
    )
    text_column: str = setting("text", "column of the text in .jsonl, .parquet and hub data sets")
    messages_column: str = setting(
        "messages", "column of a conversation, put through the chat template where a record has it"
    )
    split: str = setting("train", "split of hub data sets")
    max_length: int = setting(
        1024, "tokens of a block; texts are joined by EOS and cut into blocks"
    )
    max_tokens: int | None = setting(None, "stop after so many tokens; default: all")
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
        if self.max_tokens is not None and self.max_tokens < self.max_length:
            raise UsageError(
                f"max_tokens {self.max_tokens} is less than a block of {self.max_length}"
            )
