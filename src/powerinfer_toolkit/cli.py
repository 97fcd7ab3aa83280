"""How every command parses its flags, reports a failure and ends."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

from powerinfer_toolkit import __version__, console
from powerinfer_toolkit.errors import ExitCode, PiError

EPILOG = "exit codes: 0 ok, 1 failure, 2 usage, 3 does not fit, 130 interrupted, 141 closed pipe"


class _ShowVersion(argparse.Action):
    """--version, whose text is made when it is asked for."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, describe: Callable[[], str] | None = None
    ) -> None:
        super().__init__(
            option_strings,
            dest,
            nargs=0,
            default=argparse.SUPPRESS,
            help="show the version and exit",
        )
        self.describe = describe

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"{parser.prog} {__version__}")
        if self.describe:
            print(self.describe())
        parser.exit()


def new_parser(
    prog: str, description: str, describe_build: Callable[[], str] | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the flags that all commands share.

    --version prints the text of `describe_build` too.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=description, epilog=EPILOG, allow_abbrev=False
    )
    parser.add_argument("--version", action=_ShowVersion, describe=describe_build)
    talk = parser.add_mutually_exclusive_group()
    talk.add_argument("-v", "--verbose", action="store_true", help="say more on stderr")
    talk.add_argument(
        "-q", "--quiet", action="store_true", help="only errors and warnings on stderr"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    return parser


def run(
    parser: argparse.ArgumentParser,
    command: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse `argv`, run `command` and return the exit code; failures become `error:` and `hint:` lines."""
    args = parser.parse_args(argv)
    console.set_verbosity(console.VERBOSE if args.verbose else console.QUIET if args.quiet else 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters of a model's text
    try:
        command(args)
        sys.stdout.flush()
    except PiError as failure:
        if args.debug or os.environ.get("PI_DEBUG"):
            raise
        console.error(failure.message, failure.hint)
        return failure.exit_code
    except KeyboardInterrupt:
        console.error("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return ExitCode.CLOSED_PIPE
    except OSError as failure:
        if args.debug or os.environ.get("PI_DEBUG"):
            raise
        console.error(*_describe(failure))
        return ExitCode.FAILURE
    return ExitCode.OK


def _silence_stdout() -> None:
    """Keep the interpreter's last flush from failing on the closed pipe again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _describe(failure: OSError) -> tuple[str, str]:
    where = f": {failure.filename}" if failure.filename else ""
    hint = "check the path, its permissions and the free space on its disk"
    return f"{failure.strerror or failure}{where}", hint
