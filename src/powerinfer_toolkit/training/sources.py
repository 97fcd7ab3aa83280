"""Where a text comes from: local files, or a data set of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.settings import setting


@dataclass(frozen=True)
class DataSource:
    """One source of documents: local files, or a data set of the Hugging Face hub."""

    path: str = setting("", "file or glob: .jsonl or .parquet records, else text; .gz and .xz too")
    id: str = setting("", "data set of the hub, instead of path")
    config: str | None = setting(None, "configuration of the hub's data set")
    split: str = setting("train", "split of the hub's data set")
    text_column: str = setting("text", "field of a record that holds the text")
    messages_column: str = setting("messages", "field that holds a chat, for the chat template")
    document_separator: str = setting("", "text between the documents of a text file")
    max_documents: int | None = setting(None, "read at most so many documents")
    weight: float | None = setting(None, "share of the training blocks, relative to the others'")

    @property
    def name(self) -> str:
        """What messages call the source."""
        return self.path or self.id


def check_seed(seed: int) -> None:
    """Refuse a seed that numpy's or torch's generators do not take. Raises UsageError."""
    if not 0 <= seed < 2**32:
        raise UsageError(f"seed is {seed}", hint="give 0 to 2^32 - 1")


def check_sources(
    dataset_mixture: Sequence[DataSource], eval_mixture: Sequence[DataSource]
) -> None:
    """Refuse sources that contradict themselves or each other. Raises UsageError."""
    if not dataset_mixture:
        raise UsageError(
            "dataset_mixture is empty", hint="give at least one {path: ...} or {id: ...}"
        )
    for source in [*dataset_mixture, *eval_mixture]:
        if bool(source.path) == bool(source.id):
            raise UsageError(
                f"a source has path {source.path!r} and id {source.id!r}",
                hint="give one of the two",
            )
        for name in ("weight", "max_documents"):
            number = getattr(source, name)
            if number is not None and number <= 0:
                raise UsageError(
                    f"the {name} of {source.name} is {number}, not above 0",
                    hint="give a number above 0, or leave the source out",
                )
    weights = [source.weight for source in dataset_mixture]
    if None in weights and any(weights):
        raise UsageError(
            "some sources of dataset_mixture have a weight and some have none",
            hint="give all of them one, or none (then each block is seen once an epoch)",
        )
