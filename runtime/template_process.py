"""The program's side of template_sandbox: starts the process, asks it, ends it when it takes too long."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from powerinfer_toolkit.errors import PiError

_MODULE = "powerinfer_toolkit.runtime.template_sandbox"
_START_SECONDS = 60.0  # a busy machine may need them; usually 0.1
_END_SECONDS = 1.0
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "PYTHONHOME", "TZ")
_BYTES_PER_CHARACTER = 12  # JSON writes one outside the basic plane as two escapes
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class TemplateLimits:
    """What one rendering may take."""

    characters: int = 4_000_000  # of output, about a million tokens
    cpu_seconds: float = 2.0
    wall_seconds: float = 20.0  # other work may keep the process waiting
    memory_bytes: int = 512 << 20  # address space of the process


class TemplateProcess:
    """The sandbox process: started once, used by every template, replaced when it had to be killed.

    Safe to use from several threads.
    """

    def __init__(self, limits: TemplateLimits) -> None:
        """Start nothing yet."""
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # process id: a fork must not talk to its parent's sandbox
        self._is_ready = False

    def start(self) -> None:
        """Start the process without waiting for it. PiError where it cannot be started."""
        with self._lock:
            self._started()

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        """Return what the template `source` makes of `values`, which have JSON's types only.

        PiError where the template fails, refuses the values or passes a limit.
        """
        request = {
            "source": source,
            "values": values,
            "cpu_seconds": self._limits.cpu_seconds,
            "max_characters": self._limits.characters,
        }
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as failure:
            raise PiError(
                f"the chat holds a value that JSON has no word for: {failure}",
                hint="messages hold text, numbers, lists and mappings",
            ) from None
        with self._lock:
            answer = self._ask(line)
        if "error" in answer:
            hint = "some templates want the roles user and assistant by turns, or no system message"
            raise PiError(f"the model's chat template failed: {answer['error']}", hint=hint)
        return answer["text"]

    def _ask(self, line: bytes) -> dict[str, str]:
        process = self._started()
        stdin, stdout = _pipes(process)
        max_bytes = _BYTES_PER_CHARACTER * self._limits.characters + _CHUNK_BYTES
        try:
            if not self._is_ready:
                _read_line(stdout, _START_SECONDS, _CHUNK_BYTES)
                self._is_ready = True
            stdin.write(line)
            stdin.flush()
            answer: dict[str, str] = json.loads(
                _read_line(stdout, self._limits.wall_seconds, max_bytes)
            )
            return answer
        except (EOFError, TimeoutError, BrokenPipeError, ValueError) as failure:
            self._kill(process)
            raise self._failure(process, failure) from None
        except BaseException:  # Ctrl-C: the next request must not get this one's answer
            self._kill(process)
            raise

    def _started(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None or process.poll() is not None or self._owner != os.getpid():
            process = self._process = _start(self._limits.memory_bytes)
            self._owner = os.getpid()
            self._is_ready = False
            weakref.finalize(self, _end, process)
        return process

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        process.kill()
        _end(process)

    def _failure(self, process: subprocess.Popen[bytes], failure: Exception) -> PiError:
        if not self._is_ready:
            command = f"{sys.executable} -m {_MODULE} {self._limits.memory_bytes}"
            return PiError(
                "the process for chat templates did not start", hint=f"to see why: {command}"
            )
        late = isinstance(failure, TimeoutError) or process.returncode == -signal.SIGPROF
        seconds = f"it takes more than {self._limits.cpu_seconds:g} s"
        return PiError(
            f"the model's chat template failed: {seconds if late else 'its process broke down'}",
            hint="the template in the file is broken or hostile: do without the chat",
        )


def _start(memory_bytes: int) -> subprocess.Popen[bytes]:
    """Start the process in a session of its own, which the terminal's Ctrl-C does not reach."""
    environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-P", "-m", _MODULE, str(memory_bytes)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as failure:
        raise PiError(
            f"cannot start the process for chat templates: {failure}",
            hint="check the limits on processes and memory; -p without --chat needs no template",
        ) from failure


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes, on which an idle process ends, and wait for it."""
    for pipe in _pipes(process):
        with suppress(OSError):  # what a dead process never read
            pipe.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None:
        raise ValueError("the process was started without pipes")
    return process.stdin, process.stdout


def _read_line(pipe: IO[bytes], seconds: float, max_bytes: int) -> bytes:
    """Return the next line; EOFError where there is none, TimeoutError where it is late or too long."""
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    line = bytearray()
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or len(line) > max_bytes or not poll.poll(left * 1000):
            raise TimeoutError
        chunk = os.read(pipe.fileno(), _CHUNK_BYTES)
        if not chunk:
            raise EOFError
        line += chunk
    return bytes(line)
