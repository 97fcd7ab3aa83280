"""How every command parses its flags, reports a failure and ends."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from powerinfer_toolkit import __version__, console
from powerinfer_toolkit.errors import ExitCode, PiError

EPILOG = "exit codes: 0 ok, 1 failure, 2 usage, 3 does not fit, 130 interrupted, 141 closed pipe"


class CommandParser(argparse.ArgumentParser):
    """A parser whose complaints look like every other failure."""

    def error(self, message: str) -> NoReturn:
        """Print the `error:` line and end with the code for usage."""
        self._fail(message, f"{self.prog} --help lists what there is")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401
        """Parse as argparse does, but refuse flags that do not exist, with the nearest one that does."""
        found, unknown = super().parse_known_args(args, namespace)
        flags = [word.split("=")[0] for word in unknown if word.startswith("--")]
        near = difflib.get_close_matches(flags[0], self._option_string_actions, 1) if flags else []
        if near:
            self._fail(f"unrecognized arguments: {' '.join(unknown)}", f"did you mean {near[0]}?")
        return found, unknown

    def _fail(self, message: str, hint: str) -> NoReturn:
        console.error(message, hint)
        self.exit(ExitCode.USAGE)


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
    parser = CommandParser(prog=prog, description=description, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--version", action=_ShowVersion, describe=describe_build)
    _add_talk(parser, default=False)
    return parser


def add_command(commands: Any, name: str, description: str) -> argparse.ArgumentParser:  # noqa: ANN401
    """Return the parser of a subcommand, with the flags that all commands share.

    `commands` is what add_subparsers returned.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, description=description, help=description, epilog=EPILOG, allow_abbrev=False
    )
    _add_talk(parser, default=argparse.SUPPRESS)  # what stands before the subcommand holds too
    return parser


def _add_talk(parser: argparse.ArgumentParser, default: Any) -> None:  # noqa: ANN401
    talk = parser.add_mutually_exclusive_group()
    for names, text in (
        (("-v", "--verbose"), "say more on stderr"),
        (("-q", "--quiet"), "only errors and warnings on stderr"),
    ):
        talk.add_argument(*names, action="store_true", default=default, help=text)
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of a failure"
    )


def run(
    parser: argparse.ArgumentParser,
    command: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None = None,
) -> int:
    """Parse `argv`, run `command` and return the exit code; failures become `error:` and `hint:` lines."""
    try:
        _open_missing_streams()
        code = _run(parser, command, argv)
    except BrokenPipeError:
        code = ExitCode.CLOSED_PIPE
    except KeyboardInterrupt:  # the second one, before the first was reported
        code = _interrupted(argv)
    _leave_closed_pipes()
    if argv is None:  # the process ends here; it has nothing left to interrupt
        _ignore_interrupts()
    return code


def _run(
    parser: argparse.ArgumentParser,
    command: Callable[[argparse.Namespace], None],
    argv: Sequence[str] | None,
) -> ExitCode:
    debug = bool(os.environ.get("PI_DEBUG"))
    try:
        args = _parse(parser, argv)
        debug = debug or args.debug
        command(args)
        sys.stdout.flush()
    except (PiError, MemoryError, OSError) as failure:
        if debug or isinstance(failure, BrokenPipeError):
            raise
        return _report(failure)
    except RuntimeError as failure:
        if debug or not _is_of_device_memory(failure):
            raise
        console.error("out of GPU memory", "ask for less at once, free the GPU, or use another")
        return ExitCode.DOES_NOT_FIT
    except KeyboardInterrupt:
        return _interrupted(argv)
    return ExitCode.OK


def _is_of_device_memory(failure: RuntimeError) -> bool:
    """Return whether torch says so, which is imported only where it is needed."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(failure, torch.cuda.OutOfMemoryError)


def _interrupted(argv: Sequence[str] | None) -> ExitCode:
    """Say that the command was interrupted, however often Ctrl-C comes meanwhile."""
    while True:
        try:
            if argv is None:  # the process ends here
                _ignore_interrupts()
            console.error("interrupted")
            return ExitCode.INTERRUPTED
        except KeyboardInterrupt:
            continue


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags and prepare the streams as they say."""
    try:
        args = parser.parse_args(argv)
    finally:
        sys.stdout.flush()  # of --help and --version
    console.set_verbosity(console.VERBOSE if args.verbose else console.QUIET if args.quiet else 0)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters of a model's text
    return args


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep Ctrl-C back until the end of the block, for imports: NumPy calls an interrupted one a broken
    installation."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def _report(failure: PiError | MemoryError | OSError) -> ExitCode:
    """Print a failure and return its exit code."""
    if isinstance(failure, PiError):
        console.error(failure.message, failure.hint)
        return failure.exit_code
    if isinstance(failure, MemoryError):
        console.error("out of memory", "ask for less at once, or close other programs")
        return ExitCode.DOES_NOT_FIT
    console.error(*_describe(failure))
    return ExitCode.FAILURE


def _open_missing_streams() -> None:
    """Put the null device where the shell closed a stream: files must not take its number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, "r", encoding="utf-8", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _leave_closed_pipes() -> None:
    """Keep the interpreter's last flush from failing on a closed pipe again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _ignore_interrupts() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _describe(failure: OSError) -> tuple[str, str]:
    where = f": {failure.filename}" if failure.filename else ""
    hint = "check the path, its permissions and the free space on its disk"
    return f"{failure.strerror or failure}{where}", hint
