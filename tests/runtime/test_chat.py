"""The conversation, and the prompt loop of pi-run --chat, over a scripted model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime.chat import Chat, Repl
from powerinfer_toolkit.runtime.chat_template import ChatTemplate
from powerinfer_toolkit.runtime.tokenizer import Tokenizer
from powerinfer_toolkit.tokenizer_keys import tokenizer_metadata
from spine.trained_tokenizers import TEMPLATE, train_byte_level

SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}


@pytest.fixture(autouse=True)
def normal_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests may have run a command with -q."""
    monkeypatch.setattr(console, "_verbosity", console.NORMAL)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = train_byte_level(tmp_path_factory.mktemp("bpe") / "model")
    values = {entry.name: entry.value for entry in tokenizer_metadata(folder, 1201).keys}
    return Tokenizer.from_metadata(values.get)


@dataclass(frozen=True)
class Piece:
    id: int
    text: str


class Answer:
    """Yields the tokens of a scripted answer, and raises what stands at its end."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int], end: BaseException | None) -> None:
        self.finish_reason = ""
        self.remainder = ""
        self.decode_seconds = 0.0
        self._tokenizer, self._ids, self._end = tokenizer, ids, end

    def __iter__(self) -> Iterator[Piece]:
        stream = self._tokenizer.decoder()
        for token_id in self._ids:
            self.decode_seconds += 0.25
            yield Piece(token_id, stream.feed(token_id))
        if self._end is not None:
            raise self._end
        self.remainder = stream.finish()
        self.finish_reason = "stop"


class ScriptedModel:
    """Answers with the next of its scripts and keeps the prompts it was given."""

    def __init__(
        self, tokenizer: Tokenizer, *scripts: tuple[list[int], BaseException | None]
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts: list[list[int]] = []
        self.options: list[dict[str, Any]] = []
        self._scripts = iter(scripts)

    def generate(self, prompt: list[int], **options: Any) -> Answer:
        self.prompts.append(list(prompt))
        self.options.append(options)
        ids, end = next(self._scripts)
        return Answer(self.tokenizer, ids, end)


def answer_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text one character at a time: not those that encoding it would give."""
    ids = [i for c in text for i in tokenizer.encode(c, add_special=False)]
    assert len(text) < 3 or ids != tokenizer.encode(text, add_special=False)
    return ids


def full_prompt(tokenizer: Tokenizer, *contents: str) -> list[int]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    text = ChatTemplate(TEMPLATE).render(messages, special_tokens=SPECIAL)
    return tokenizer.encode(text, add_special=False)


def test_the_second_prompt_continues_the_tokens_of_the_first(tokenizer: Tokenizer) -> None:
    first = answer_ids(tokenizer, "there are words")
    model = ScriptedModel(tokenizer, (first, None), (answer_ids(tokenizer, "b"), None))
    chat = Chat(model, n_predict=7)
    assert "".join(chat.turn("how")) == "there are words"
    assert (
        chat.prompt_tokens("and?")[: len(model.prompts[0]) + len(first)] == model.prompts[0] + first
    )
    assert "".join(chat.turn("and?")) == "b"
    assert model.prompts[0] == full_prompt(tokenizer, "how")
    assert model.prompts[1][: len(model.prompts[0]) + len(first)] == model.prompts[0] + first
    end = full_prompt(tokenizer, "how", "there are words", "and?")
    rest = model.prompts[1][len(model.prompts[0]) + len(first) :]
    assert end[-len(rest) :] == rest
    assert rest[0] == 2  # <|im_end|>
    assert all(options == {"reuse_cache": True, "n_predict": 7} for options in model.options)
    assert [m["content"] for m in chat.messages] == ["how", "there are words", "and?", "b"]
    assert "tokens in the context; last answer: 1 tokens" in chat.stats


def test_a_changed_history_is_encoded_anew(tokenizer: Tokenizer) -> None:
    ids = answer_ids(tokenizer, "words")
    model = ScriptedModel(tokenizer, (ids, None), (ids, None), (ids, None))
    chat = Chat(model)
    list(chat.turn("a"))
    chat.messages[1]["content"] = "other"
    list(chat.turn("b"))
    assert model.prompts[1] == full_prompt(tokenizer, "a", "other", "b")
    chat.reset()
    list(chat.turn("c"))
    assert model.prompts[2] == full_prompt(tokenizer, "c")


def test_an_answer_with_special_tokens_is_encoded_anew(tokenizer: Tokenizer) -> None:
    """With ignore_eos an answer may hold end tokens, which its text does not show."""
    ids = [*answer_ids(tokenizer, "wor"), 2, *answer_ids(tokenizer, "ds")]
    model = ScriptedModel(tokenizer, (ids, None), (ids, None))
    chat = Chat(model)
    assert "".join(chat.turn("a")) == "words"
    list(chat.turn("b"))
    assert model.prompts[1] == full_prompt(tokenizer, "a", "words", "b")


def test_the_system_message_stays(tokenizer: Tokenizer) -> None:
    model = ScriptedModel(tokenizer, ([5], None), ([5], None))
    chat = Chat(model, system="Be brief.")
    list(chat.turn("a"))
    chat.reset()
    list(chat.turn("b"))
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    assert "Be brief." in tokenizer.decode(model.prompts[1])


def test_a_failure_leaves_the_history(tokenizer: Tokenizer) -> None:
    ids = answer_ids(tokenizer, "words")
    model = ScriptedModel(tokenizer, (ids, None), (ids, PiError("full")), (ids, None))
    chat = Chat(model)
    list(chat.turn("a"))
    with pytest.raises(PiError, match="full"):
        list(chat.turn("b"))
    assert [m["content"] for m in chat.messages] == ["a", "words"]
    list(chat.turn("c"))
    assert model.prompts[2][: len(model.prompts[0]) + len(ids)] == model.prompts[0] + ids


def test_a_base_model_cannot_chat(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(PiError, match="no chat template"):
        Chat(ScriptedModel(tokenizer))


def talk(chat: Chat, *lines: str | type[BaseException] | None) -> str:
    """Run the prompt loop over the lines; returns what it writes."""
    source = iter(lines)
    written: list[str] = []

    def read() -> str | None:
        line = next(source)
        if isinstance(line, type):
            raise line
        return line

    Repl(chat, read=read, write=written.append).run()
    return "".join(written)


def test_commands(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    ids = answer_ids(tokenizer, "words")
    model = ScriptedModel(tokenizer, (ids, None), (ids, None))
    chat = Chat(model)
    lines = ["", "/stats", " a ", "/stats", "/reset", "/stats", "b", "/help", "/what", "/quit", "c"]
    assert talk(chat, *lines) == "words\nwords\n"
    assert [m["content"] for m in chat.messages] == ["b", "words"]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("no answer yet") == 2
    assert shown.err.count("last answer: 5 tokens, 3.2 tokens/s") == 1  # 4 steps in 1.25 s
    assert "/reset  forget" in shown.err
    assert "unknown command /what" in shown.err


def test_ctrl_c_stops_the_answer_and_the_next_leaves(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = answer_ids(tokenizer, "words")
    model = ScriptedModel(tokenizer, (ids[:2], KeyboardInterrupt()), (ids, None))
    chat = Chat(model)
    assert talk(chat, "a", "b", KeyboardInterrupt, "c") == "wo\nwords\n"
    assert "[stopped]" in capsys.readouterr().err
    assert [m["content"] for m in chat.messages] == ["a", "wo", "b", "words"]
    kept = model.prompts[0] + ids[:2]
    assert model.prompts[1][: len(kept)] == kept


def test_an_interrupted_writer_keeps_the_history(tokenizer: Tokenizer) -> None:
    ids = answer_ids(tokenizer, "words")
    chat = Chat(ScriptedModel(tokenizer, (ids, None)))

    def write(piece: str) -> None:
        if piece == "r":
            raise KeyboardInterrupt

    Repl(chat, write=write).answer("a")
    assert [m["content"] for m in chat.messages] == ["a", "wor"]


def test_the_loop_goes_on_after_a_failure(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = answer_ids(tokenizer, "words")
    model = ScriptedModel(tokenizer, ([], PiError("too long")), (ids, None))
    assert talk(Chat(model), "a", "b", None) == "words\n"
    assert "error: too long" in capsys.readouterr().err
