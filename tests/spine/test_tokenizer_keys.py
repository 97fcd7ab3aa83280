"""GGUF keys from checkpoints: what they say, and that tokenizers made from them encode as the originals."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.runtime.tokenizer import Tokenizer as RuntimeTokenizer
from powerinfer_toolkit.tokenizer_keys import tokenizer_metadata
from powerinfer_toolkit.tokenizer_pre import PRE_TOKENIZERS
from spine.tokenizer_texts import texts, varied_texts
from spine.trained_tokenizers import (
    LLAMA_STYLE,
    TEMPLATE,
    embedded_and_rebuilt,
    train_byte_level,
    train_sentencepiece,
    write_json,
)

SHARED = Path(__file__).parents[3] / "shared" / "models" / "smollm2-135m-reglu"
PATHS = ("embedded", "rebuilt")


def keys_of(folder: Path, n_vocab: int) -> dict[str, Any]:
    return {entry.name: entry.value for entry in tokenizer_metadata(folder, n_vocab).keys}


def differences(expected: dict[str, list[int]], tokenizer: RuntimeTokenizer) -> list[str]:
    return [text for text, ids in expected.items() if tokenizer.encode(text) != ids]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_byte_level(tmp_path_factory.mktemp("bpe") / "model")


@pytest.fixture(scope="module")
def transformers_ids() -> Any:
    transformers = pytest.importorskip("transformers")

    def encode(folder: Path) -> dict[str, list[int]]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return dict(zip(varied_texts(), tokenizer(varied_texts()).input_ids, strict=True))

    return encode


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared model")
def test_smollm2_encodes_as_transformers(path: str, transformers_ids: Any) -> None:
    tokenizer = RuntimeTokenizer.from_metadata(embedded_and_rebuilt(SHARED, 49152)[path])
    assert differences(transformers_ids(SHARED), tokenizer) == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_byte_level_bpe_encodes_as_transformers(
    path: str, adds_bos: bool, tmp_path: Path, transformers_ids: Any
) -> None:
    folder = train_byte_level(tmp_path / "model", adds_bos=adds_bos)
    get = embedded_and_rebuilt(folder, 1201)[path]
    assert get("tokenizer.ggml.add_bos_token") is adds_bos
    tokenizer = RuntimeTokenizer.from_metadata(get)
    assert differences(transformers_ids(folder), tokenizer) == []


@pytest.mark.parametrize(
    ("path", "legacy"), [("embedded", None), ("embedded", False), ("rebuilt", None)]
)
def test_sentencepiece_bpe_encodes_as_the_original(
    path: str, legacy: bool | None, tmp_path: Path
) -> None:
    processor = train_sentencepiece(tmp_path, **LLAMA_STYLE)
    if legacy is not None:
        write_json(tmp_path / "tokenizer_config.json", {"legacy": legacy})
    tokenizer = RuntimeTokenizer.from_metadata(embedded_and_rebuilt(tmp_path, 800)[path])
    # Metaspace (legacy=False, as in transformers) adds no dummy space before a space.
    spaced = (" ", "\u2581") if legacy is False else ()
    for text in varied_texts():
        if not text.startswith(spaced):
            ids = tokenizer.encode(text, parse_special=False)
            assert ids == [1, *processor.encode(text)], text
        assert tokenizer.decode(processor.encode(text)) == processor.decode(processor.encode(text))


def test_sentencepiece_bpe_encodes_as_llama_tokenizer(
    tmp_path: Path, transformers_ids: Any
) -> None:
    pytest.importorskip("google.protobuf")
    train_sentencepiece(tmp_path, **LLAMA_STYLE)
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "add_bos_token": True,
        "add_eos_token": True,
        "added_tokens_decoder": {"800": {"content": "<|im_end|>", "special": True}},
    }
    write_json(tmp_path / "tokenizer_config.json", config)
    get = embedded_and_rebuilt(tmp_path, 801)["embedded"]
    assert differences(transformers_ids(tmp_path), RuntimeTokenizer.from_metadata(get)) == []


@pytest.mark.parametrize("path", PATHS)
def test_unigram_encodes_as_the_original(path: str, tmp_path: Path) -> None:
    processor = train_sentencepiece(
        tmp_path, **LLAMA_STYLE | {"model_type": "unigram", "split_digits": False}
    )
    tokenizer = RuntimeTokenizer.from_metadata(embedded_and_rebuilt(tmp_path, 800)[path])
    ties = 0
    for text in varied_texts():
        expected = processor.encode(text)
        found = tokenizer.encode(text, parse_special=False)
        # Segmentations of the same pieces have the same probability: "###" is "##", "#" or "#", "##".
        assert sorted(found) == sorted(expected), text
        ties += found != expected
    assert ties <= 0.02 * len(varied_texts())


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("path", PATHS)
def test_sentencepiece_default_normaliser(path: str, model_type: str, tmp_path: Path) -> None:
    processor = train_sentencepiece(tmp_path, model_type=model_type, byte_fallback=True)
    tokenizer = RuntimeTokenizer.from_metadata(embedded_and_rebuilt(tmp_path, 800)[path])
    for text in texts():
        composed = unicodedata.normalize("NFC", text)
        if any(unicodedata.combining(c) for c in composed) or composed != text:
            continue  # `tokenizers` drops marks that it cannot compose
        found = tokenizer.encode(text, add_special=False, parse_special=False)
        assert sorted(found) == sorted(processor.encode(text)), text


def test_user_defined_pieces_stay_whole(tmp_path: Path) -> None:
    options = LLAMA_STYLE | {"user_defined_symbols": ["<|im_end|>", "\u2581\u2581", "word"]}
    processor = train_sentencepiece(tmp_path, **options)
    values = keys_of(tmp_path, 800)
    tokenizer = RuntimeTokenizer.from_metadata(values.get)
    for text in varied_texts():
        assert tokenizer.encode(text, add_special=False, parse_special=False) == processor.encode(
            text
        )
    assert values["tokenizer.ggml.tokens"][3:6] == ["<|im_end|>", "  ", "word"]
    assert values["tokenizer.ggml.token_type"][:7] == [2, 3, 3, 4, 4, 4, 6]


def test_names_of_special_tokens_stay_text_where_pieces_are_isolated(tmp_path: Path) -> None:
    options = LLAMA_STYLE | {"user_defined_symbols": ["word"], "add_dummy_prefix": False}
    processor = train_sentencepiece(tmp_path, **options)
    tokenizer = RuntimeTokenizer.from_metadata(keys_of(tmp_path, 800).get)
    for text in ("<s>", "</s>", "<unk>", "word<s>word"):
        found = tokenizer.encode(text, add_special=False, parse_special=False)
        assert found == processor.encode(text)
        assert not set(found) & {0, 1, 2}


def test_keys_of_a_byte_level_tokenizer(byte_level: Path) -> None:
    spec = json.loads((byte_level / "tokenizer.json").read_text())
    keys = tokenizer_metadata(byte_level, 1204)
    values = {entry.name: entry.value for entry in keys.keys}
    assert (keys.model, keys.pre, keys.n_tokens) == ("gpt2", "gpt-2", 1201)
    tokens = values["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in spec["model"]["vocab"].values()] == list(spec["model"]["vocab"])
    assert tokens[1200:] == ["<user é token>", "[PAD1201]", "[PAD1202]", "[PAD1203]"]
    types = values["tokenizer.ggml.token_type"]
    assert types[:4] == [3, 3, 3, 1]
    assert types[1200:] == [4, 5, 5, 5]
    assert Counter(types) == {3: 3, 1: 1197, 4: 1, 5: 3}
    assert values["tokenizer.ggml.merges"] == [" ".join(m) for m in spec["model"]["merges"]]
    ids = [values[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos", "unknown")]
    assert ids == [1, 2, 0]
    assert "tokenizer.ggml.padding_token_id" not in values
    assert "tokenizer.ggml.scores" not in values
    assert values["tokenizer.ggml.add_eos_token"] is False
    assert values["tokenizer.ggml.add_space_prefix"] is False
    assert values["tokenizer.chat_template"] == TEMPLATE
    assert json.loads(values[Key.TOKENIZER_JSON]) == spec


def test_keys_of_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    processor = train_sentencepiece(tmp_path, **LLAMA_STYLE)
    write_json(tmp_path / "added_tokens.json", {"<|im_end|>": 801})
    write_json(tmp_path / "special_tokens_map.json", {"pad_token": "<|im_end|>"})
    keys = tokenizer_metadata(tmp_path, 803)
    values = {entry.name: entry.value for entry in keys.keys}
    assert (keys.model, keys.pre, keys.n_tokens) == ("llama", "default", 802)
    tokens = values["tokenizer.ggml.tokens"]
    assert tokens[:800] == [processor.id_to_piece(i) for i in range(800)]
    assert tokens[800:] == ["[PAD800]", "<|im_end|>", "[PAD802]"]
    scores = values["tokenizer.ggml.scores"]
    assert scores[:800] == [processor.get_score(i) for i in range(800)]
    types = values["tokenizer.ggml.token_type"]
    assert types[:3] == [2, 3, 3]
    assert types[3:259] == [6] * 256
    assert types[800:] == [5, 3, 5]
    ids = [
        values[f"tokenizer.ggml.{role}_token_id"] for role in ("bos", "eos", "unknown", "padding")
    ]
    assert ids == [1, 2, 0, 801]
    assert values["tokenizer.ggml.add_bos_token"] is True
    assert values["tokenizer.ggml.add_space_prefix"] is True


def test_scores_without_a_sentencepiece_model(tmp_path: Path) -> None:
    """A tokenizer.json alone gives scores that rank pieces as its merges do."""
    train_sentencepiece(tmp_path / "a", **LLAMA_STYLE)
    (tmp_path / "b").mkdir()
    text = keys_of(tmp_path / "a", 800)[Key.TOKENIZER_JSON]
    (tmp_path / "b" / "tokenizer.json").write_text(text, encoding="utf-8")
    get = embedded_and_rebuilt(tmp_path / "b", 800)["rebuilt"]
    original = RuntimeTokenizer.from_metadata(keys_of(tmp_path / "a", 800).get)
    rebuilt = RuntimeTokenizer.from_metadata(get)
    for example in texts():
        assert rebuilt.encode(example, add_special=False) == original.encode(
            example, add_special=False
        )


def test_keys_survive_a_gguf_file(byte_level: Path, tmp_path: Path) -> None:
    keys = tokenizer_metadata(byte_level, 1201).keys
    writer = GGUFWriter(tmp_path / "keys.gguf", "llama")
    for entry in keys:
        writer.add_key_value(entry.name, entry.value, entry.value_type, entry.element_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    fields = GGUFReader(tmp_path / "keys.gguf").fields
    for entry in keys:
        assert fields[entry.name].contents() == entry.value
        assert fields[entry.name].types[0] == entry.value_type
        assert (fields[entry.name].types[-1] == entry.element_type) or entry.element_type is None
    assert {entry.value_type for entry in keys} <= set(GGUFValueType)


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([], "gpt-2"),
        ([pre_tokenizers.Digits(individual_digits=True)], "smollm"),
        *(([pre_tokenizers.Split(Regex(r), "isolated") for r in row.regexes], name)
          for name, row in PRE_TOKENIZERS.items() if name not in ("gpt-2", "falcon")),
    ],
)  # fmt: skip
def test_pre_tokenizers_are_recognised(
    steps: list[Any], name: str, byte_level: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(byte_level, tmp_path / "copy")
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    split = any(isinstance(step, pre_tokenizers.Split) for step in steps)
    mapping = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, mapping])
    if PRE_TOKENIZERS[name].nfc:
        tokenizer.normalizer = normalizers.NFC()
    spec = json.loads(tokenizer.to_str())
    spec["model"]["ignore_merges"] = PRE_TOKENIZERS[name].ignore_merges
    write_json(copy / "tokenizer.json", spec)
    assert tokenizer_metadata(copy, 1201).pre == name


def test_an_unknown_pre_tokenizer_is_called_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = pre_tokenizers.Split(Regex("[aeiou]"), "isolated")
    mapping = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    folder = train_byte_level(tmp_path / "m", pre_tokenizers.Sequence([split, mapping]))
    assert tokenizer_metadata(folder, 1201).pre == "default"
    assert "pre_tokenizer" in capsys.readouterr().err


def test_a_known_cut_with_other_rules_is_warned_of(
    byte_level: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(byte_level, tmp_path / "copy")
    spec = json.loads((copy / "tokenizer.json").read_text())
    for change, is_warned in (({}, False), ({"normalizer": {"type": "NFC"}}, True)):
        write_json(copy / "tokenizer.json", spec | change)
        assert tokenizer_metadata(copy, 1201).pre == "gpt-2"
        assert ("differs from 'gpt-2'" in capsys.readouterr().err) == is_warned


def test_flags_of_special_tokens_are_lost_in_the_keys(byte_level: Path, tmp_path: Path) -> None:
    """The documented difference: the embedded file knows that a token swallows spaces, the keys do not."""
    copy = shutil.copytree(byte_level, tmp_path / "copy")
    spec = json.loads((copy / "tokenizer.json").read_text())
    for token in spec["added_tokens"]:
        token["lstrip"] = token["rstrip"] = True
    write_json(copy / "tokenizer.json", spec)
    found = embedded_and_rebuilt(copy, 1201)
    spaced, tight = "a  <|im_end|> \n b", "a<|im_end|>b"
    embedded, rebuilt = (RuntimeTokenizer.from_metadata(found[path]) for path in PATHS)
    assert embedded.encode(spaced) == embedded.encode(tight) == rebuilt.encode(tight)
    assert rebuilt.encode(spaced) != rebuilt.encode(tight)


def test_other_tokens_around_a_text_are_warned_of(
    byte_level: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(byte_level, tmp_path / "copy")
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(copy / "tokenizer.json"))
    tokenizer_metadata(copy, 1201)
    assert "adds the tokens [0], which GGUF cannot express" in capsys.readouterr().err


def test_template_and_ends_from_the_older_files(byte_level: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(byte_level, tmp_path / "copy")
    (copy / "chat_template.jinja").unlink()
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    write_json(copy / "tokenizer_config.json", {"chat_template": templates, "add_bos_token": True})
    write_json(copy / "special_tokens_map.json", {"bos_token": "<|im_start|>"})
    write_json(copy / "config.json", {"eos_token_id": [2, 0], "pad_token_id": -1})
    write_json(copy / "generation_config.json", {"eos_token_id": [2, 0]})
    values = keys_of(copy, 1201)
    assert values["tokenizer.chat_template"] == "y"
    assert values["tokenizer.ggml.eos_token_id"] == 2
    assert values["tokenizer.ggml.eot_token_id"] == 0
    assert values["tokenizer.ggml.add_bos_token"] is True
    assert "tokenizer.ggml.padding_token_id" not in values


def test_missing_and_damaged_files(byte_level: Path, tmp_path: Path) -> None:
    with pytest.raises(PiError, match="no tokenizer in") as caught:
        tokenizer_metadata(tmp_path, 10)
    assert "tokenizer.json" in caught.value.hint
    assert "tokenizer.model" in caught.value.hint
    with pytest.raises(PiError, match="1201 tokens, the model only 1200"):
        tokenizer_metadata(byte_level, 1200)
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(PiError, match="not a SentencePiece model"):
        tokenizer_metadata(tmp_path, 10)
    for text in ("{", "[]", "{}", '{"model": {"type": "WordPiece", "vocab": {}}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(PiError):
            tokenizer_metadata(tmp_path, 10)


def test_every_truncation_of_a_sentencepiece_model_is_refused_or_read(tmp_path: Path) -> None:
    train_sentencepiece(tmp_path, **LLAMA_STYLE)
    path = tmp_path / "tokenizer.model"
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        try:
            tokenizer_metadata(tmp_path, 800)
        except PiError:
            continue
