"""What every refused command looks like, and a way to run one in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

TALK = ("plan: ", "warning: ")  # what may stand on stderr before the failure


@dataclass(frozen=True)
class Said:
    """Exit code, stdout and stderr of one run."""

    code: int
    out: str
    err: str


def run_command(
    main: Callable[[Sequence[str]], int],
    capsys: pytest.CaptureFixture[str],
    *flags: object,
    stdin: bytes | None = None,
) -> Said:
    """Runs a command's main; `stdin` None is a terminal."""
    with standard_input(stdin):
        try:
            code = main([str(flag) for flag in flags])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
    return Said(code, *capsys.readouterr())


@contextmanager
def standard_input(data: bytes | None) -> Iterator[None]:
    class Source(io.TextIOWrapper):
        def isatty(self) -> bool:
            return data is None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", Source(io.BytesIO(data or b"")))
        yield


def assert_refused(said: Said, code: int, says: str) -> None:
    """The exit code, one error line that says it, one hint line, no data, no traceback."""
    assert said.out == ""
    lines = [line for line in said.err.splitlines() if not line.startswith(TALK)]
    assert [line.split(": ")[0] for line in lines] == ["error", "hint"], said.err
    assert says in lines[0]
    assert len(lines[1]) > len("hint: ")
    assert said.code == code
