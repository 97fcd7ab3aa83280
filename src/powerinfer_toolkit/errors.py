"""The one exception that users see, and the exit codes of every command."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes, the same for every command; native status codes use the same numbers."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    INTERRUPTED = 130
    CLOSED_PIPE = 141


class PiError(Exception):
    """A failure the user can act on.

    `message` becomes the `error:` line and `hint` the `hint:` line; `exit_code` ends the process.
    """

    def __init__(
        self, message: str, *, hint: str = "", exit_code: ExitCode = ExitCode.FAILURE
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


class UsageError(PiError):
    """A flag or an argument that cannot be honoured (exit code 2)."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, exit_code=ExitCode.USAGE)


class DoesNotFit(PiError):
    """A budget that the plan cannot keep (exit code 3); the message names the minimum."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, exit_code=ExitCode.DOES_NOT_FIT)
