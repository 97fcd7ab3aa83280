"""What commands say: data goes to stdout, talk to stderr, progress bars only to a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

QUIET, NORMAL, VERBOSE = -1, 0, 1
_verbosity = NORMAL


def set_verbosity(level: int) -> None:
    """Set how much goes to stderr: QUIET (errors and warnings), NORMAL or VERBOSE."""
    global _verbosity
    _verbosity = level


def verbosity() -> int:
    """Return the level set by -q and -v."""
    return _verbosity


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def info(text: str) -> None:
    """Say something unless -q was given."""
    if _verbosity >= NORMAL:
        _say(text)


def detail(text: str) -> None:
    """Say something only with -v."""
    if _verbosity >= VERBOSE:
        _say(text)


def warning(text: str) -> None:
    """Say what the user should know even with -q."""
    _say(f"warning: {text}")


def error(message: str, hint: str = "") -> None:
    """Print the one `error:` line of a failure and its `hint:`."""
    _say("error: " + " ".join(message.splitlines()))
    if hint:
        _say("hint: " + " ".join(hint.splitlines()))


def progress(items: Iterable[T], *, total: int | None, label: str, unit: str = "it") -> Iterator[T]:
    """Yield `items` under a progress bar on stderr; a plain line every 30 s where it is no terminal.

    `total` is None where the number of items is not known.
    """
    from tqdm import tqdm

    hidden = _verbosity < NORMAL or bool(os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"))
    interval = 0.1 if sys.stderr.isatty() else 30.0
    yield from tqdm(
        items,
        total=total,
        desc=label,
        unit=unit,
        disable=hidden,
        mininterval=interval,
        maxinterval=max(10.0, interval),
        delay=0 if sys.stderr.isatty() else 5.0,
        file=sys.stderr,
    )
