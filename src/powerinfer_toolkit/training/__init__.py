"""What the stages that need the extra `train` share: checkpoints in transformers, and texts as token blocks.

Importing this package imports no torch; its modules do.
"""

from __future__ import annotations

import importlib.util

from powerinfer_toolkit.errors import PiError

REQUIRED = ("torch", "transformers", "accelerate")


def require_train_extra(command: str) -> None:
    """Raise PiError where the packages of the extra `train` are missing."""
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        raise PiError(
            f"{command} needs {', '.join(missing)}",
            hint="pip install 'powerinfer-toolkit[train]'",
        )
