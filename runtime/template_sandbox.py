"""The process in which chat templates run: `python -m powerinfer_toolkit.runtime.template_sandbox`.

A template is foreign code from a model file. jinja2's sandbox keeps it away from Python's internals, but
cannot bound what one operation takes: a padded string, a comparison of shared lists, the constant that the
compiler folds. The kernel can, for a process of its own. Requests and answers are lines of JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

READY = b"ready\n"
_ERROR_CHARACTERS = 500
_FEW_DESCRIPTORS = 16


class _GenerationTag(Extension):
    """{% generation %}: marks answers for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _compile(source: str) -> Template:
    """Return the template in an environment like the one that templates on the hub are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without jinja2's HTML escapes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _render(source: str, values: Mapping[str, Any], max_characters: int) -> str:
    pieces: list[str] = []
    room = max_characters
    for piece in _compile(source).generate(values):
        room -= len(piece)
        if room < 0:
            raise TemplateError(f"it writes more than {max_characters} characters")
        pieces.append(piece)
    return "".join(pieces)


def _answer(line: bytes) -> bytes:
    """Return {"text": ...} or {"error": ...} for one request."""
    request = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])  # SIGPROF ends the process
    try:
        text = _render(request["source"], request["values"], request["max_characters"])
        return json.dumps({"text": text}).encode()
    except Exception as failure:  # foreign code: any exception is the template's
        return json.dumps({"error": _describe(failure)}).encode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _describe(failure: Exception) -> str:
    """Return one printable line; the text is the template's and could steer a terminal."""
    if isinstance(failure, MemoryError):
        return "it needs more memory than a prompt can"
    if isinstance(failure, RecursionError):
        return "it calls itself without end"
    line = " ".join(str(failure)[:_ERROR_CHARACTERS].split())
    return "".join(c for c in line if c.isprintable()) or type(failure).__name__


def _limit(max_bytes: int) -> None:
    """Bound the address space; no file can be written, and few be opened."""
    for kind, value in (
        (resource.RLIMIT_AS, max_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _FEW_DESCRIPTORS),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(kind)
        bound = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (bound, bound))


def main() -> None:
    """Answer requests until stdin ends. The one argument is the limit of the address space in bytes."""
    _limit(int(sys.argv[1]))
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_answer(line) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
