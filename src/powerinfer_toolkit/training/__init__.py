"""What the stages that need the extra `train` share: checkpoints in transformers, and texts as token blocks.

Importing this package imports no torch; its modules do.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings

from powerinfer_toolkit import console
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


def speaks() -> bool:
    """Return whether this process is the one of a launch that talks; silence the others."""
    if os.environ.get("RANK", "0") == "0":
        return True
    console.set_verbosity(console.QUIET)
    return False


def calm_libraries() -> None:
    """Leave talking to the commands: no warnings, log lines and progress bars of torch and transformers."""
    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore", module="torch|transformers|accelerate|peft")
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
