"""Damaged and hostile tokenizer files: one PiError, whether embedded in a model or read from a checkpoint."""

from __future__ import annotations

import base64
import json
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.runtime.tokenizer import Tokenizer
from powerinfer_toolkit.tokenizer_keys import tokenizer_metadata
from spine.tokenizer_families import gemma, llama2, llama3, opt, sequence, split, t5
from spine.tokenizer_texts import texts

Json = dict[str, Any]
KINDS = {writer.__name__: writer for writer in (llama3, llama2, gemma, t5, opt)}
EXAMPLES = texts()[:20] + texts()[-10:]
SECONDS = 20  # no damage may make loading or a short text slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind, write in KINDS.items():
        made[kind] = tmp_path_factory.mktemp(kind)
        write(made[kind])
    return made


def n_rows(folder: Path) -> int:
    vocabulary = folder / "vocab.json"
    if vocabulary.is_file():
        return len(json.loads(vocabulary.read_text()))
    spec = json.loads((folder / "tokenizer.json").read_text())
    return max(len(spec["model"]["vocab"]), *(token["id"] + 1 for token in spec["added_tokens"]))


@cache
def keys_of(folder: Path) -> dict[str, Any]:
    return {entry.name: entry.value for entry in tokenizer_metadata(folder, n_rows(folder)).keys}


def embedded(folder: Path) -> tuple[dict[str, Any], Json]:
    """The keys of a converted checkpoint, and the tokenizer.json among them."""
    return keys_of(folder), json.loads(keys_of(folder)[Key.TOKENIZER_JSON])


def steps(count: int, step: Json) -> Json:
    return sequence(*[step] * count, kind="normalizers")


def replacing(old: str, new: str) -> Json:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def charsmap(table: bytes) -> Json:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def set_model(**settings: Any) -> Callable[[Json], Any]:
    return lambda spec: spec["model"].update(settings)


def set_part(**parts: Any) -> Callable[[Json], Any]:
    return lambda spec: spec.update(parts)


BYTE_CHAIN = sequence(*[{"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}] * 40)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_model(continuing_subword_prefix="a"), "continuing_subword_prefix is not supported"),
        (set_model(end_of_word_suffix="</w>"), "end_of_word_suffix is not supported"),
        (set_model(dropout=0.1), "dropout is not supported"),
        (set_model(type="WordPiece"), "'WordPiece' is not supported"),
        (set_model(type=None, merges=None), "cannot be read"),
        (set_model(merges=[["a", "zqzq"]]), "cannot be read"),
        (set_model(vocab={"a": 0, "b": 1}), "cannot be read"),
        (set_model(vocab=[]), "cannot be read"),
        (set_part(model=None), "has no model"),
        (set_part(normalizer=steps(40, replacing("a", "aa"))), "lengthens texts"),
        (set_part(normalizer=replacing("", "x" * 300)), "lengthens texts"),
        (set_part(normalizer=steps(9, {"type": "Prepend", "prepend": "x"})), "lengthens texts"),
        (set_part(pre_tokenizer=BYTE_CHAIN), "lengthens texts"),
        (set_part(normalizer=charsmap(b"")), "no compiled normalisation"),
        (set_part(normalizer=charsmap(bytes(3))), "no compiled normalisation"),
        (set_part(normalizer=charsmap(b"\4\0\0\0aaaa" + b"x" * 300 + b"\0")), "writes 300 bytes"),
        (set_part(normalizer={"type": "Precompiled", "precompiled_charsmap": "!"}), "charsmap"),
        (set_part(normalizer={"type": "NoSuch"}), "cannot be read"),
        (set_part(pre_tokenizer=split("((")), "cannot be read"),
        (set_part(added_tokens=[{"id": 0}]), "cannot be read"),
    ],
)
def test_hostile_embedded_files(
    change: Callable[[Json], Any], message: str, folders: dict[str, Path]
) -> None:
    values, spec = embedded(folders["llama3"])
    change(spec)
    with pytest.raises(PiError, match=message) as caught:
        Tokenizer.from_metadata((values | {Key.TOKENIZER_JSON: json.dumps(spec)}).get)
    assert caught.value.message.startswith(Key.TOKENIZER_JSON)
    assert caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", "[" * 100_000, '{"a":' * 100_000, '{"model": {"type": "BPE", "type": "BPE"}}', "\ud800"],
)  # fmt: skip
def test_embedded_text_that_is_no_tokenizer(text: str, folders: dict[str, Path]) -> None:
    values, _ = embedded(folders["llama3"])
    with pytest.raises(PiError, match=Key.TOKENIZER_JSON.replace(".", r"\.")):
        Tokenizer.from_metadata((values | {Key.TOKENIZER_JSON: text}).get)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_part(pre_tokenizer=split("(a+)+$")), "a" * 40 + "c"),  # gives up after ten million steps
        (set_model(vocab={"a": 4_000_000_000}, merges=[]), "a"),
        (set_model(unk_token="<none>", vocab={"a": 0}, merges=[]), "b"),
        (
            set_part(model={"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]], "byte_fallback": False}),
            "b",
        ),
    ],
)  # fmt: skip
def test_what_shows_only_when_encoding(
    change: Callable[[Json], Any], text: str, folders: dict[str, Path]
) -> None:
    values, spec = embedded(folders["llama3"])
    change(spec)
    tokenizer = Tokenizer.from_metadata((values | {Key.TOKENIZER_JSON: json.dumps(spec)}).get)
    begin = time.monotonic()
    with pytest.raises(PiError) as caught:
        tokenizer.encode(text)
    assert caught.value.hint
    assert time.monotonic() - begin < SECONDS


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("llama2", "added_tokens.json", {"<new>": 2**33}),
        ("llama2", "added_tokens.json", {"<new>": -1}),
        ("opt", "added_tokens.json", {"<new>": 2**33}),
        ("opt", "vocab.json", {"a": 2**33}),
        ("opt", "vocab.json", {"a": -1}),
        ("opt", "vocab.json", {"a": "0"}),
        ("opt", "tokenizer_config.json", {"tokenizer_class": "CodeGenTokenizer"}),
        (
            "opt",
            "tokenizer_config.json",
            {"added_tokens_decoder": {"99999999999": {"content": "x"}}},
        ),
    ],
)
def test_ids_and_classes_that_cannot_be(
    kind: str, name: str, content: Json, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Ids in the billions would be billions of unused tokens."""
    folder = shutil.copytree(folders[kind], tmp_path / "m")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(PiError) as caught:
        tokenizer_metadata(folder, 1400)
    assert caught.value.hint


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**33),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=4),
    st.just([]),
    st.just({}),
    st.just([[]]),
    st.just([{}]),
    st.sampled_from(
        ["ByteLevel", "Sequence", "BPE", "Unigram", "Split", "Isolated", "Strip", "NFC"]
    ),
)


@st.composite
def damaged(draw: st.DrawFn, content: Any) -> Any:
    """A copy of JSON content with one to three places replaced, taken out or doubled."""
    content = json.loads(json.dumps(content))
    for _ in range(draw(st.integers(1, 3))):
        node = content
        while isinstance(node, dict | list) and node:
            keys = list(node) if isinstance(node, dict) else range(len(node))
            key = keys[draw(st.integers(0, min(len(keys) - 1, 30)))]
            if (
                not isinstance(node[key], dict | list)
                or not node[key]
                or draw(st.integers(0, 2)) == 0
            ):
                if draw(st.booleans()):
                    node[key] = json.loads(json.dumps(draw(JUNK)))
                elif isinstance(node, list) and draw(st.booleans()):
                    node.append(json.loads(json.dumps(node[key])))
                else:
                    del node[key]
                break
            node = node[key]
    return content


def use(tokenizer: Tokenizer) -> None:
    for text in EXAMPLES:
        try:
            ids = tokenizer.encode(text)
        except PiError:
            continue
        assert isinstance(tokenizer.decode(ids), str)


@given(data=st.data(), kind=st.sampled_from(["llama3", "llama2", "gemma", "t5"]))
@settings(max_examples=250, deadline=None)
def test_any_damage_to_the_embedded_file(
    folders: dict[str, Path], data: st.DataObject, kind: str
) -> None:
    values, spec = embedded(folders[kind])
    text = json.dumps(data.draw(damaged(spec)))
    begin = time.monotonic()
    try:
        tokenizer = Tokenizer.from_metadata((values | {Key.TOKENIZER_JSON: text}).get)
    except PiError as failure:
        assert Key.TOKENIZER_JSON in failure.message  # noqa: PT017
    else:
        use(tokenizer)
    assert time.monotonic() - begin < SECONDS


CONTENTS = {
    "added_tokens.json": {"<new>": 5, "<other>": 1310},
    "special_tokens_map.json": {"bos_token": "<s>", "additional_special_tokens": ["<new>"]},
    "config.json": {"eos_token_id": [1, 2], "pad_token_id": -1},
    "generation_config.json": {"eos_token_id": [2, 3]},
}


@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), has_json=st.booleans())
@settings(max_examples=250, deadline=None)
def test_any_damage_to_a_checkpoint(
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    kind: str,
    has_json: bool,
) -> None:
    folder = shutil.copytree(folders[kind], tmp_path_factory.mktemp("damaged") / "m")
    for name, content in CONTENTS.items():
        (folder / name).write_text(json.dumps(content))
    if not has_json and (folder / "tokenizer.model").is_file():
        (folder / "tokenizer.json").unlink()
    names = sorted(path.name for path in folder.iterdir())
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        path = folder / name
        if path.suffix == ".json" and data.draw(st.integers(0, 5)):
            path.write_text(json.dumps(data.draw(damaged(json.loads(path.read_text())))))
        else:
            content = bytearray(path.read_bytes())
            where = data.draw(st.integers(0, len(content) - 1))
            content[where] ^= data.draw(st.integers(1, 255))
            path.write_bytes(bytes(content[: data.draw(st.integers(where, len(content)))]))
    begin = time.monotonic()
    try:
        values = {entry.name: entry.value for entry in tokenizer_metadata(folder, 1400).keys}
        use(Tokenizer.from_metadata(values.get))
    except PiError as failure:
        assert failure.message  # noqa: PT017
    assert time.monotonic() - begin < SECONDS
    shutil.rmtree(folder)
