"""Generation: one prompt through the model, then token after token, as an iterator."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Self

from powerinfer_toolkit.runtime.sampling import Sampler, Sampling

if TYPE_CHECKING:
    from powerinfer_toolkit.runtime.model import Model
    from powerinfer_toolkit.runtime.tokenizer import TextStream


@dataclass(frozen=True)
class Token:
    """One generated token; `text` is what it adds to the output, "" while a character is incomplete."""

    id: int
    text: str
    logprob: float  # natural log, before temperature and truncation


@dataclass(frozen=True)
class Limits:
    """When a generation ends."""

    n_predict: int = -1  # tokens; negative: until the end of generation or of the context
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()  # texts that end the output and are not part of it


class Generation(Iterator[Token]):
    """Iterator over the generated tokens.

    After the end `finish_reason` is "stop" (an end-of-generation token or a stop text), "length"
    (n_predict) or "context" (the context is full), and `remainder` is text that was held back until then:
    the beginning of a stop text, or an incomplete character. Times are wall-clock seconds:
    `prompt_seconds` up to the first token, `decode_seconds` for all later ones.
    """

    def __init__(
        self, model: Model, prompt: Sequence[int], sampling: Sampling, limits: Limits
    ) -> None:
        """Take a prompt of token ids; nothing is computed before the first token is asked for."""
        self.prompt = list(prompt)
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self.remainder = ""
        self.prompt_seconds = 0.0
        self.decode_seconds = 0.0
        self._model = model
        self._limits = limits
        self._sampler = Sampler(sampling)
        self._output = _Output(model.tokenizer.decoder(), limits.stop)
        self._user = 0  # of the model's sequence

    @property
    def seed(self) -> int:
        """The seed in use, also where none was asked for."""
        return self._sampler.seed

    def __iter__(self) -> Self:
        """Return the iterator itself."""
        return self

    def __next__(self) -> Token:
        """Compute the next token; Ctrl-C during it raises KeyboardInterrupt."""
        if self.finish_reason:
            raise StopIteration
        if 0 <= self._limits.n_predict <= len(self.token_ids):
            self._finish("length")
        if self.token_ids:
            token_id, logprob = self._decode()
        else:
            token_id, logprob = self._read_prompt()
        if token_id in self._model.tokenizer.eog_ids and not self._limits.ignore_eos:
            self._finish("stop")
        self._sampler.accept(token_id)
        self.token_ids.append(token_id)
        text, stopped = self._output.feed(token_id)
        if stopped:
            self.finish_reason = "stop"
        return Token(token_id, text, logprob)

    def _read_prompt(self) -> tuple[int, float]:
        start = time.perf_counter()
        for token_id in self.prompt:
            self._sampler.accept(token_id)
        self._user = self._model.start_text(self.prompt, self._sampler.n_top())
        drawn = self._sampler.sample(self._model.engine)
        self.prompt_seconds = time.perf_counter() - start
        return drawn

    def _decode(self) -> tuple[int, float]:
        start = time.perf_counter()
        n_top = self._sampler.n_top()
        if not self._model.continue_text(self._user, self.token_ids[-1], n_top):
            self._finish("context")
        drawn = self._sampler.sample(self._model.engine)
        self.decode_seconds += time.perf_counter() - start
        return drawn

    def _finish(self, reason: str) -> NoReturn:
        self.finish_reason = reason
        self.remainder = self._output.finish()
        raise StopIteration


class _Output:
    """The text of tokens as they come, held back where a stop text may have begun."""

    def __init__(self, stream: TextStream, stop: tuple[str, ...]) -> None:
        self._stream = stream
        self._stop = [text for text in stop if text]
        self._held = ""

    def feed(self, token_id: int) -> tuple[str, bool]:
        """Return the text that is settled now, and whether a stop text ended it."""
        self._held += self._stream.feed(token_id)
        ends = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if ends:
            return self._held[: min(ends)], True
        settled = len(self._held) - self._begun()
        text, self._held = self._held[:settled], self._held[settled:]
        return text, False

    def finish(self) -> str:
        """Return what is held back."""
        return self._held + self._stream.finish()

    def _begun(self) -> int:
        """Return the length of the longest end of the held text that begins a stop text."""
        longest = max((len(text) - 1 for text in self._stop), default=0)
        for n in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-n:]) for text in self._stop):
                return n
        return 0
