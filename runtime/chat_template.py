"""Chat templates: messages to prompt text, as transformers renders them (its "Chat templates" guide)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from powerinfer_toolkit.runtime.template_process import TemplateLimits, TemplateProcess

Message = Mapping[str, Any]
_SHARED_PROCESS = TemplateProcess(TemplateLimits())


class ChatTemplate:
    """A chat template, which is rendered in a process of its own: it is foreign code from a file."""

    def __init__(self, source: str, *, process: TemplateProcess = _SHARED_PROCESS) -> None:
        """Start the process ahead of the first rendering. PiError where it cannot be started."""
        self._source = source
        self._process = process
        process.start()

    def render(
        self,
        messages: Sequence[Message],
        *,
        special_tokens: Mapping[str, str],
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> str:
        """Return the prompt for `messages`, each {"role": ..., "content": ...}.

        `special_tokens` are the template's bos_token, eos_token and so on; all values have JSON's types.
        PiError where the template is none, refuses the messages, fails or passes a limit.
        """
        values = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **special_tokens,
            **variables,
        }
        return self._process.render(self._source, values)
