"""The runtime's tokenizer: decoding, streams of tokens, special tokens, threads, damaged files."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.runtime.tokenizer import Tokenizer
from powerinfer_toolkit.tokenizer_format import SPACE
from powerinfer_toolkit.tokenizer_keys import tokenizer_metadata
from spine.tokenizer_texts import texts
from spine.trained_tokenizers import LLAMA_STYLE, train_byte_level, train_sentencepiece

N_BPE, N_PIECES = 1203, 800
Values = dict[str, Any]
REPLACEMENT = "\ufffd"


def values_of(folder: Path, n_vocab: int) -> Values:
    return {entry.name: entry.value for entry in tokenizer_metadata(folder, n_vocab).keys}


@pytest.fixture(scope="module")
def bpe_values(tmp_path_factory: pytest.TempPathFactory) -> Values:
    return values_of(train_byte_level(tmp_path_factory.mktemp("bpe") / "model"), N_BPE)


@pytest.fixture(scope="module")
def spm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spm")
    train_sentencepiece(folder, **LLAMA_STYLE)
    return folder


@pytest.fixture(scope="module")
def processor(spm_folder: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(spm_folder / "tokenizer.model"))


@pytest.fixture(scope="module")
def bpe(bpe_values: Values) -> Tokenizer:
    return Tokenizer.from_metadata(bpe_values.get)


@pytest.fixture(scope="module")
def spm(spm_folder: Path) -> Tokenizer:
    return Tokenizer.from_metadata(values_of(spm_folder, N_PIECES).get)


def pieces_of(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    stream = tokenizer.decoder(**options)
    return [*(stream.feed(token_id) for token_id in ids), stream.finish()]


def test_texts_survive(bpe: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (bpe, spm):
        for text in texts():
            expected = text if tokenizer is bpe else text.replace(SPACE, " ")
            assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == expected


@given(ids=st.lists(st.integers(0, N_BPE - 1), max_size=40))
@settings(max_examples=400, deadline=None)
def test_byte_level_decoding_is_that_of_tokenizers(
    bpe: Tokenizer, bpe_values: Values, ids: list[int]
) -> None:
    """Any ids at all, complete characters or not; ours and Rust's replacement of bad bytes agree."""
    reference = tokenizers.Tokenizer.from_str(bpe_values[Key.TOKENIZER_JSON])
    for skip_special in (True, False):
        plain = [i for i in ids if i != 1200]  # tokenizers garbles added tokens outside ASCII
        expected = reference.decode(plain, skip_special_tokens=skip_special)
        assert bpe.decode(plain, skip_special=skip_special) == expected


@given(ids=st.lists(st.integers(0, N_PIECES - 1), max_size=40))
@settings(max_examples=400, deadline=None)
def test_sentencepiece_decoding_is_the_original(
    spm: Tokenizer, processor: sentencepiece.SentencePieceProcessor, ids: list[int]
) -> None:
    # SentencePiece shows unknown as U+2047, and keeps a space that is spelt as a byte at the start.
    known = [i for i in ids if i not in (0, 1, 2, 3 + ord(" "))]
    # It writes U+FFFD for every bad byte; ours, as Unicode recommends, for every cut-off character.
    found, expected = (
        re.sub(f"{REPLACEMENT}+", REPLACEMENT, decode(known))
        for decode in (spm.decode, processor.decode)
    )
    assert found == expected


@given(data=st.data(), kind=st.sampled_from(["bpe", "spm"]), starts=st.booleans())
@settings(max_examples=400, deadline=None)
def test_pieces_of_a_stream_join_to_the_text(
    bpe: Tokenizer, spm: Tokenizer, data: st.DataObject, kind: str, starts: bool
) -> None:
    tokenizer = bpe if kind == "bpe" else spm
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_vocab - 1), max_size=40))
    pieces = pieces_of(tokenizer, ids, starts_text=True, skip_special=starts)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=starts)
    for piece in pieces:
        piece.encode("utf-8")


@given(text=st.text(max_size=40), kind=st.sampled_from(["bpe", "spm"]))
@settings(max_examples=400, deadline=None)
def test_a_stream_never_shows_half_a_character(
    bpe: Tokenizer, spm: Tokenizer, text: str, kind: str
) -> None:
    tokenizer = bpe if kind == "bpe" else spm
    text = text.replace(SPACE, " ")
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    pieces = pieces_of(tokenizer, ids, starts_text=True)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    position = 0
    for piece in pieces:
        assert text.startswith(piece, position)
        position += len(piece)


def test_a_character_of_four_tokens_comes_with_the_last(bpe: Tokenizer, spm: Tokenizer) -> None:
    for tokenizer in (bpe, spm):
        ids = tokenizer.encode("\U00012345", add_special=False)
        pieces = pieces_of(tokenizer, ids, starts_text=True)
        assert len(ids) >= 4
        assert pieces[-2:] == ["\U00012345", ""]
        assert set(pieces[:-2]) <= {""}
        unfinished = pieces_of(tokenizer, ids[:-1], starts_text=True)
        assert "".join(unfinished) == unfinished[-1] == REPLACEMENT


def test_the_dummy_space_is_dropped_only_at_the_start_of_a_text(spm: Tokenizer) -> None:
    ids = spm.encode("the day", add_special=False)
    assert "".join(pieces_of(spm, ids)) == " the day"
    assert "".join(pieces_of(spm, ids, starts_text=True)) == "the day"
    assert spm.decode(spm.encode("  two spaces")) == "  two spaces"


def test_special_tokens(bpe: Tokenizer, spm: Tokenizer) -> None:
    assert (bpe.bos_id, bpe.eos_id, bpe.eog_ids) == (1, 2, {0, 2})
    assert (spm.bos_id, spm.eos_id, spm.eog_ids) == (1, 2, {2})
    assert spm.encode("") == [1]
    assert spm.encode("", add_special=False) == []
    assert bpe.encode("a<|im_end|>")[-1] == 2
    as_text = bpe.encode("a<|im_end|>", parse_special=False)
    assert 2 not in as_text
    assert bpe.decode(as_text) == "a<|im_end|>"
    assert bpe.decode([1, *as_text, 2]) == "a<|im_end|>"
    assert bpe.decode([1, 2], skip_special=False) == "<|im_start|><|im_end|>"
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    assert bpe.special_tokens == names
    assert bpe.encode("x<user é token>y")[1:-1] == [1200]
    assert bpe.decode([1200]) == "<user é token>"
    assert bpe.decode([1201, 1202]) == ""  # padding of the embedding


def test_end_of_turn_from_its_key(bpe_values: Values) -> None:
    values = bpe_values | {"tokenizer.ggml.eot_token_id": 700, "tokenizer.ggml.eos_token_id": None}
    tokenizer = Tokenizer.from_metadata(values.get)
    assert tokenizer.eos_id is None
    assert tokenizer.eog_ids == {0, 2, 700}


def test_bos_and_eos_follow_the_keys(bpe_values: Values) -> None:
    values = bpe_values | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokenizer = Tokenizer.from_metadata(values.get)
    assert tokenizer.encode("a", add_special=True)[0] == 1
    assert tokenizer.encode("a", add_special=True)[-1] == 2
    assert tokenizer.encode("a", add_special=False) == tokenizer.encode("a")[1:-1]


def test_embedded_truncation_and_padding_are_ignored(bpe_values: Values) -> None:
    backend = tokenizers.Tokenizer.from_str(bpe_values[Key.TOKENIZER_JSON])
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer.from_metadata((bpe_values | {Key.TOKENIZER_JSON: backend.to_str()}).get)
    assert tokenizer.encode("a b c d e f g h") == Tokenizer.from_metadata(bpe_values.get).encode(
        "a b c d e f g h"
    )


def test_threads_do_not_mix_their_settings(bpe: Tokenizer) -> None:
    text = "<|im_start|>a" * 50
    expected = {flag: bpe.encode(text, parse_special=flag) for flag in (True, False)}
    wrong: list[bool] = []

    def work(flag: bool) -> None:
        for _ in range(50):
            if bpe.encode(text, parse_special=flag) != expected[flag]:
                wrong.append(flag)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert expected[True] != expected[False]
    assert wrong == []


def test_refusals(bpe: Tokenizer, bpe_values: Values) -> None:
    with pytest.raises(PiError, match="not valid UTF-8"):
        bpe.encode("\udc80")
    for token_id in (-1, N_BPE):
        with pytest.raises(PiError, match="outside the vocabulary"):
            bpe.decode([token_id])
    with pytest.raises(PiError, match=r"has no tokenizer\.ggml\.model"):
        Tokenizer.from_metadata({}.get)
    with pytest.raises(PiError, match="json has no model"):
        Tokenizer.from_metadata((bpe_values | {Key.TOKENIZER_JSON: "{}"}).get)
