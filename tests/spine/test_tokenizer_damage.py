"""Damaged tokenizer keys and files: one PiError that names the key, or a tokenizer that still works."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.runtime.tokenizer import Tokenizer
from powerinfer_toolkit.tokenizer_keys import tokenizer_metadata
from spine.tokenizer_families import gemma, llama2, llama3, t5
from spine.tokenizer_texts import texts

Values = dict[str, Any]
KINDS = {"llama3": llama3, "llama2": llama2, "gemma": gemma, "t5": t5}
GGML = "tokenizer.ggml."
IDS = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id", "eot_token_id")
FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces")
ARRAYS = ("tokens", "token_type", "scores", "merges", "precompiled_charsmap")
NAMES = [
    *(GGML + name for name in ("model", "pre", *IDS, *FLAGS, *ARRAYS)),
    "tokenizer.chat_template",
]
EXAMPLES = texts()[:40] + texts()[-10:]
SECONDS = 20  # no mutation may make loading slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Values]:
    """The keys of undamaged files, as a GGUF reader gives them, by kind of tokenizer."""
    made = {}
    for kind, write in KINDS.items():
        folder = tmp_path_factory.mktemp(kind)
        write(folder)
        spec = json.loads((folder / "tokenizer.json").read_text())
        ids = [*range(len(spec["model"]["vocab"])), *(t["id"] for t in spec["added_tokens"])]
        keys = tokenizer_metadata(folder, max(ids) + 3).keys
        made[kind] = {
            e.name: list(e.value) if e.element_type is not None else e.value for e in keys
        }
    return made


def foreign(values: Values, **changes: Any) -> Values:
    """The keys without ours, some of them changed; None takes one out."""
    kept = {name: value for name, value in values.items() if name != Key.TOKENIZER_JSON}
    return kept | {GGML + name: value for name, value in changes.items()}


def changed(values: list[Any], index: int, value: Any) -> list[Any]:
    return [*values[:index], value, *values[index + 1 :]]


def failure_of(values: Values) -> PiError:
    with pytest.raises(PiError) as caught:
        Tokenizer.from_metadata(values.get)
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("kind", "key", "change"),
    [
        ("llama3", "tokens", lambda v: None),
        ("llama3", "tokens", lambda v: 7),
        ("llama3", "tokens", lambda v: []),
        ("llama3", "tokens", lambda v: changed(v, 5, v[6])),
        ("llama3", "tokens", lambda v: changed(v, 5, 5)),
        ("llama3", "token_type", lambda v: v[:-1]),
        ("llama3", "token_type", lambda v: [*v, 1]),
        ("llama3", "token_type", lambda v: [1.0] * len(v)),
        ("llama3", "token_type", lambda v: changed(v, 9, 7)),
        ("llama3", "token_type", lambda v: changed(v, 9, -1)),
        ("llama3", "merges", lambda v: None),
        ("llama3", "merges", lambda v: [*v, "zqzq x"]),
        ("llama3", "merges", lambda v: [*v, "x zqzq"]),
        ("llama3", "merges", lambda v: [*v, "x"]),
        ("llama3", "merges", lambda v: [*v, ""]),
        ("llama3", "merges", lambda v: [*v, "a b c"]),
        ("llama3", "merges", lambda v: "a b"),
        ("llama3", "pre", lambda v: "no-such"),
        ("llama3", "pre", lambda v: 3),
        ("llama3", "model", lambda v: None),
        ("llama3", "model", lambda v: "bert"),
        ("llama3", "model", lambda v: ["gpt2"]),
        *(("llama3", name, lambda v: 10**6) for name in ("bos_token_id", "eos_token_id", "eot_token_id")),
        *(("llama2", name, lambda v: -1) for name in ("bos_token_id", "unknown_token_id")),
        ("llama3", "bos_token_id", lambda v: 1.5),
        ("llama3", "bos_token_id", lambda v: True),
        ("llama3", "bos_token_id", lambda v: "<s>"),
        *(("llama2", name, lambda v: 2) for name in ("add_bos_token", "add_eos_token", "add_space_prefix")),
        ("t5", "remove_extra_whitespaces", lambda v: "yes"),
        ("llama2", "scores", lambda v: v[:-1]),
        ("llama2", "scores", lambda v: changed(v, 300, math.nan)),
        ("llama2", "scores", lambda v: ["0"] * len(v)),
        ("t5", "token_type", lambda v: [1] * len(v)),  # no unknown token, no bytes
        ("llama2", "tokens", lambda v: changed(v, 400, "\u2581" * 20_000)),
        ("t5", "precompiled_charsmap", lambda v: v[:3]),
        ("t5", "precompiled_charsmap", lambda v: v[:-1]),
        ("t5", "precompiled_charsmap", lambda v: [255, 255, 255, 127, *v[4:]]),
        ("t5", "precompiled_charsmap", lambda v: [*v, *b"x" * 300, 0]),
        ("t5", "precompiled_charsmap", lambda v: [0.5] * len(v)),
    ],
)  # fmt: skip
def test_the_damaged_key_is_named(
    kind: str, key: str, change: Callable[[Any], Any], whole: dict[str, Values]
) -> None:
    values = foreign(whole[kind], unknown_token_id=None)
    values[GGML + key] = change(values.get(GGML + key))
    assert GGML + key in failure_of(values).message


def test_lists_of_different_lengths(whole: dict[str, Values]) -> None:
    values = foreign(whole["llama3"])
    tokens = values["tokenizer.ggml.tokens"]
    said = failure_of(values | {"tokenizer.ggml.tokens": tokens[:-1]}).message
    assert f"token_type is damaged: it has {len(tokens)} elements for {len(tokens) - 1}" in said
    with pytest.raises(PiError, match=r"tokenizer\.ggml\.tokens: \d+ tokens for 7 embedding rows"):
        Tokenizer.from_metadata(values.get, 7)
    with pytest.raises(PiError, match=r"tokenizer\.ggml\.tokens: \d+ tokens for 7 embedding rows"):
        Tokenizer.from_metadata(whole["llama3"].get, 7)


def test_what_foreign_files_lack_without_harm(whole: dict[str, Values]) -> None:
    """The optional keys of upstream's files; llama.cpp's defaults take their place."""
    values = foreign(whole["llama2"])
    names = [*IDS, *FLAGS, "token_type", "pre"]
    minimal = values | {GGML + name: None for name in names}
    tokenizer = Tokenizer.from_metadata(minimal.get)
    expected = Tokenizer.from_metadata(values.get)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.adds_bos) == (1, 2, True)
    assert tokenizer.is_special(1)
    for text in EXAMPLES:
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == expected.decode(expected.encode(text))


def test_a_padding_token_that_was_never_added_is_none(whole: dict[str, Values]) -> None:
    tokenizer = Tokenizer.from_metadata(foreign(whole["llama2"], padding_token_id=32_000).get)
    assert "pad_token" not in tokenizer.special_tokens


def test_empty_tokens_are_unused(whole: dict[str, Values]) -> None:
    values = foreign(whole["llama3"])
    tokens = values["tokenizer.ggml.tokens"]
    tokenizer = Tokenizer.from_metadata(foreign(values, tokens=[*tokens[:-2], "", ""]).get)
    assert tokenizer.decode([len(tokens) - 1]) in ("", f"[PAD{len(tokens) - 1}]")


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-5, 5), max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
)


@st.composite
def damages(draw: st.DrawFn, value: Any) -> Any:
    """Another value under a key: anything at all, or the list with parts replaced, taken out or repeated."""
    if not isinstance(value, list) or not value or draw(st.integers(0, 4)) == 0:
        return draw(JUNK)
    result = list(value)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.integers(0, len(result)))
        match draw(st.sampled_from(["replace", "copy", "cut", "insert", "repeat"])):
            case "replace" if where < len(result):
                result[where] = draw(JUNK)
            case "copy" if where < len(result):
                result[where] = draw(st.sampled_from(result))
            case "cut":
                del result[where : where + draw(st.integers(1, 2000))]
            case "insert":
                result.insert(where, draw(st.one_of(JUNK, st.sampled_from(value))))
            case "repeat":
                result += result[where : where + 1000]
    return result


def use(tokenizer: Tokenizer) -> None:
    for text in EXAMPLES:
        try:
            ids = tokenizer.encode(text)
        except PiError:
            continue
        assert isinstance(tokenizer.decode(ids), str)


@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)))
@settings(max_examples=400, deadline=None)
def test_any_damage_gives_one_error_or_a_tokenizer(
    whole: dict[str, Values], data: st.DataObject, kind: str
) -> None:
    values = dict(whole[kind])
    if data.draw(st.booleans()):
        del values[Key.TOKENIZER_JSON]
    names = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True))
    for name in names:
        values[name] = data.draw(damages(values.get(name)))
    begin = time.monotonic()
    try:
        tokenizer = Tokenizer.from_metadata(values.get)
    except PiError as failure:
        assert "tokenizer." in failure.message, failure.message  # noqa: PT017
    else:
        use(tokenizer)
    assert time.monotonic() - begin < SECONDS
