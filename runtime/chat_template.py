"""Chat templates: messages to prompt text, as transformers renders them (its "Chat templates" guide).

A template is foreign code from a model file. It runs in jinja2's immutable sandbox, its output is bounded
and whatever it raises is the file's failure, not the program's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from powerinfer_toolkit.errors import PiError

Message = Mapping[str, Any]
MAX_PROMPT_CHARACTERS = 4_000_000  # about a million tokens


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, *, max_characters: int = MAX_PROMPT_CHARACTERS) -> None:
        """Compile `source`; PiError where it is no valid template."""
        self._max_characters = max_characters
        environment = _Sandbox(max_characters)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as failure:
            raise _template_error(failure) from failure

    def render(
        self,
        messages: Sequence[Message],
        *,
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Return the prompt for `messages`, each {"role": ..., "content": ...}.

        `special_tokens` are the template's bos_token, eos_token and so on. PiError where the template
        refuses the messages, fails or writes more than the limit.
        """
        values = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **special_tokens,
            **variables,
        }
        pieces: list[str] = []
        room = self._max_characters
        try:
            for piece in self._template.generate(values):
                room -= len(piece)
                if room < 0:
                    raise _too_long(self._max_characters)
                pieces.append(piece)
        except Exception as failure:  # foreign code: any exception is the template's
            raise _template_error(failure) from failure
        return "".join(pieces)


class _GenerationTag(Extension):
    """{% generation %}: marks answers for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment that templates on the hub are written for."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, max_characters: int) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self._max_characters = max_characters
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        """Refuse products that are too large before they are made."""
        if operator == "**":
            raise SecurityError("a chat template has no use for powers")
        for sequence, count in ((left, right), (right, left)):
            repeats = isinstance(sequence, str | list | tuple) and isinstance(count, int)
            if repeats and len(sequence) * count > self._max_characters:
                raise _too_long(self._max_characters)
        return super().call_binop(context, operator, left, right)


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


def _too_long(max_characters: int) -> TemplateError:
    return TemplateError(f"it writes more than {max_characters} characters")


def _template_error(failure: Exception) -> PiError:
    return PiError(
        f"the model's chat template failed: {failure or type(failure).__name__}",
        hint="some templates want the roles user and assistant by turns, or no system message",
    )
