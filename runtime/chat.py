"""A conversation with a model, and the prompt loop of `pi-run --chat`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime.chat_template import ChatTemplate
from powerinfer_toolkit.runtime.tokenizer import Tokenizer

HELP = """/help   this text
/reset  forget the conversation
/stats  tokens and speed of the last answer
/quit   leave (so do Ctrl-D, and Ctrl-C while no answer is written)"""


class GeneratedToken(Protocol):
    """One token of an answer."""

    @property
    def id(self) -> int:
        """Its id."""
        ...

    @property
    def text(self) -> str:
        """The characters it completes."""
        ...


class Answer(Protocol):
    """The tokens of an answer, and how it went once they are through; see runtime.generate.Generation."""

    finish_reason: str
    remainder: str
    decode_seconds: float

    def __iter__(self) -> Iterator[GeneratedToken]:
        """Yield the tokens."""
        ...


class ChatModel(Protocol):
    """What a conversation needs of a model; runtime.model.Model has it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer with the chat template."""
        ...

    def generate(self, *args: Any, **options: Any) -> Answer:  # noqa: ANN401
        """Return the answer to a prompt of token ids.

        With `reuse_cache`, what the last call computed for a common beginning is kept.
        """
        ...


@dataclass
class _Exchange:
    """One message, the conversation's prompt with it, and what was answered so far."""

    text: str
    prompt: str
    tokens: list[int]  # of the prompt
    ids: list[int] = field(default_factory=list)  # of the answer
    pieces: list[str] = field(default_factory=list)


class Chat:
    """A conversation: the messages so far, and the tokens that the model has seen of them."""

    def __init__(self, model: ChatModel, *, system: str = "", **options: Any) -> None:  # noqa: ANN401
        """Start a conversation; `options` go to Model.generate. PiError without a chat template."""
        source = model.tokenizer.chat_template
        if source is None:
            raise PiError(
                "the model has no chat template",
                hint="it is a base model: run it without --chat, or convert an instruct model",
            )
        self._model = model
        self._template = ChatTemplate(source)
        self._system = system
        self._options = options
        self.reset()

    def reset(self) -> None:
        """Forget the conversation, but for the system message."""
        self.messages: list[dict[str, str]] = []
        if self._system:
            self.messages.append({"role": "system", "content": self._system})
        self._seen_text = ""  # what _seen_tokens stand for
        self._seen_tokens: list[int] = []
        self.stats = ""
        self.finish_reason = ""  # of the last answer: "stop", "length" or "context"

    def prompt_tokens(self, text: str) -> list[int]:
        """Return the tokens of the conversation with the message `text` at its end."""
        return self._encode(self._render(text))

    def turn(self, text: str) -> Generator[str]:
        """Yield the pieces of the answer to `text`.

        What was answered enters the history however the iteration ends: at the answer's end, on Ctrl-C
        or because the caller stops. PiError leaves the history as it was.
        """
        self.finish_reason = ""
        prompt = self._render(text)
        tokens = self._encode(prompt)
        answer = self._model.generate(tokens, reuse_cache=True, **self._options)
        exchange = _Exchange(text, prompt, tokens)
        try:
            for token in answer:
                exchange.ids.append(token.id)
                exchange.pieces.append(token.text)
                yield token.text
            exchange.pieces.append(answer.remainder)
            yield answer.remainder
        except PiError:
            raise
        except BaseException:
            self._remember(exchange)
            raise
        self._remember(exchange)
        self.finish_reason = answer.finish_reason
        n = len(exchange.ids)
        rate = max(n - 1, 0) / max(answer.decode_seconds, 1e-9)
        self.stats = (
            f"{len(tokens) + n} tokens in the context; last answer: {n} tokens, {rate:.1f} tokens/s"
        )

    def _render(self, text: str) -> str:
        asked = [*self.messages, {"role": "user", "content": text}]
        return self._template.render(asked, special_tokens=self._model.tokenizer.special_tokens)

    def _encode(self, prompt: str) -> list[int]:
        """Return the tokens of `prompt`, which start with those seen where its text does.

        So an answer keeps the tokens that were generated, which may not be those its text encodes to.
        Only a special token is a safe border: elsewhere words could straddle it.
        """
        tokenizer = self._model.tokenizer
        if self._seen_text and prompt.startswith(self._seen_text):
            rest = tokenizer.encode(prompt[len(self._seen_text) :], add_special=False)
            if rest and tokenizer.is_special(rest[0]):
                return self._seen_tokens + rest
        return tokenizer.encode(prompt, add_special=False)

    def _remember(self, exchange: _Exchange) -> None:
        """Append one exchange; keep its tokens where they stand for exactly its text (no stop text cut)."""
        answer = "".join(exchange.pieces)
        self.messages.append({"role": "user", "content": exchange.text})
        self.messages.append({"role": "assistant", "content": answer})
        stream = self._model.tokenizer.decoder(skip_special=False)
        whole = "".join([*(stream.feed(token_id) for token_id in exchange.ids), stream.finish()])
        exact = whole == answer
        self._seen_text = exchange.prompt + answer if exact else ""
        self._seen_tokens = exchange.tokens + exchange.ids if exact else []


class Repl:
    """The prompt loop: lines from `read` (None at the end), answers to `write`, talk to stderr."""

    def __init__(
        self,
        chat: Chat,
        *,
        read: Callable[[], str | None] | None = None,
        write: Callable[[str], None] | None = None,
    ) -> None:
        """Talk over the terminal unless `read` and `write` say otherwise."""
        self._chat = chat
        self._read = read or _read_line
        self._write = write or _write_piece

    def run(self) -> None:
        """Answer line after line until /quit, the end of the input or Ctrl-C at the prompt."""
        console.info("type a message, or /help")
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                console.info("")
                return
            if line is None or line.strip() == "/quit":
                return
            if line.strip():
                self._handle(line.strip())

    def answer(self, text: str) -> None:
        """Write the answer to one message; Ctrl-C stops it. PiError as Chat.turn raises it."""
        try:
            with closing(self._chat.turn(text)) as pieces:
                for piece in pieces:
                    self._write(piece)
        except KeyboardInterrupt:
            console.info("\n[stopped]")
        self._write("\n")
        if self._chat.finish_reason == "context":
            console.warning("the context is full; /reset starts a new conversation")

    def _handle(self, line: str) -> None:
        if line == "/help":
            console.info(HELP)
        elif line == "/reset":
            self._chat.reset()
            console.info("the conversation starts anew")
        elif line == "/stats":
            console.info(self._chat.stats or "no answer yet")
        elif line.startswith("/"):
            console.warning(f"unknown command {line.split()[0]}; /help lists them")
        else:
            self._answer_or_report(line)

    def _answer_or_report(self, line: str) -> None:
        try:
            self.answer(line)
        except PiError as failure:
            console.error(failure.message, failure.hint or "/reset makes room in the context")


def _read_line() -> str | None:
    """Return one line of stdin, with a prompt and line editing on a terminal; None at its end."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        import readline  # noqa: F401 - gives input() its editing and history
    elif sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input("> " if interactive else "")
    except EOFError:
        return None


def _write_piece(piece: str) -> None:
    print(piece, end="", flush=True)
