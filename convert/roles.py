"""What a model file was made from: the roles in its manifest, and their hashes before they are known."""

from __future__ import annotations

WEIGHTS = "weights"  # a checkpoint's, or a foreign model file's
MODEL_FILE = "gguf"  # the model file that this one was made from
PREDICTORS = "predictors"
ACTIVATIONS = "activations"
IMPORTANCE = "imatrix"

_HASH_CHARACTERS = 64  # of a SHA-256 in hexadecimal


def placeholder(role: str) -> str:
    """Return what stands for a hash that is known only when all data has been read."""
    return f"<sha256 of {role}>".ljust(_HASH_CHARACTERS, "-")


def with_hashes(text: str, hashes: dict[str, str]) -> str:
    """Return a text with the hashes, by role, in their places."""
    for role, digest in hashes.items():
        text = text.replace(placeholder(role), digest)
    return text
