"""English text that every Python carries: its own documentation."""

from __future__ import annotations

import pydoc_data.topics

from powerinfer_toolkit.runtime import Model

TOPICS = ("for", "while", "try", "class", "integers", "function", "import", "exceptions", "strings")


def english(model: Model, n_tokens: int) -> list[int]:
    """The first tokens of the text."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in TOPICS)
    tokens = model.tokenizer.encode(text)[:n_tokens]
    assert len(tokens) == n_tokens
    return tokens
