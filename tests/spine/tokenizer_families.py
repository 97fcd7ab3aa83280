"""The tokenizers of model families, trained small: every section but the vocabulary as they are published.

Each function writes a checkpoint's tokenizer files to a folder.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, trainers

from spine.tokenizer_texts import training_lines
from spine.trained_tokenizers import train_sentencepiece, write_json

Json = dict[str, Any]
SPACE = "\u2581"

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_REGEX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
QWEN2_REGEX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
TEKKEN_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(*, trim: bool = True, regex: bool = True, prefix: bool = False) -> Json:
    flags = {"add_prefix_space": prefix, "trim_offsets": trim, "use_regex": regex}
    return {"type": "ByteLevel", **flags}


def split(regex: str) -> Json:
    pattern = {"Regex": regex}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


def sequence(*steps: Json, kind: str = "pretokenizers") -> Json:
    return {"type": "Sequence", kind: list(steps)}


def framed(token: str, token_id: int, *, after: bool = False) -> Json:
    """The post-processor that puts one token before the text, or after it."""
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = [{"Sequence": {"id": "B", "type_id": 1}}]
    single = [text, special] if after else [special, text]
    tokens = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single + second,
        "special_tokens": tokens,
    }


def write_bpe(
    folder: Path,
    pre_tokenizer: Json,
    *,
    first: tuple[str, ...] = (),
    last: tuple[str, ...] = (),
    framing: str | None = None,
    normalizer: Json | None = None,
    ignore_merges: bool = False,
    **config: Any,
) -> None:
    """A byte-level BPE of 1,300 tokens; special tokens come `first` or `last`, `framing` before a text."""
    spec = empty_spec(normalizer, pre_tokenizer, byte_level())
    spec["model"]["ignore_merges"] = ignore_merges
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    trainer = trainers.BpeTrainer(
        vocab_size=1300,
        special_tokens=list(first),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_lines(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in last])
    spec = json.loads(tokenizer.to_str())
    if framing is not None:
        spec["post_processor"] = framed(framing, tokenizer.token_to_id(framing))
    spec["model"]["ignore_merges"] = ignore_merges
    write_spec(folder, spec, **config)


def empty_spec(normalizer: Json | None, pre_tokenizer: Json | None, decoder: Json) -> Json:
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": {},
        "merges": [],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def write_spec(folder: Path, spec: Json, **config: Any) -> None:
    write_json(folder / "tokenizer.json", spec)
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        | config,
    )


def llama3(folder: Path) -> None:
    write_bpe(
        folder,
        sequence(split(LLAMA3_REGEX), byte_level(regex=False)),
        last=("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|eot_id|>"),
        framing="<|begin_of_text|>",
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        ignore_merges=True,
    )


def tekken(folder: Path) -> None:
    write_bpe(
        folder,
        sequence(split(TEKKEN_REGEX), byte_level(regex=False)),
        first=("<unk>", "<s>", "</s>", "[INST]", "[/INST]"),
        framing="<s>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        ignore_merges=True,
    )


def smollm2(folder: Path) -> None:
    digits = {"type": "Digits", "individual_digits": True}
    write_bpe(
        folder,
        sequence(digits, byte_level()),
        first=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<jupyter_code>"),
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
    )


def qwen2(folder: Path) -> None:
    write_bpe(
        folder,
        sequence(split(QWEN2_REGEX), byte_level(trim=False, regex=False)),
        last=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        eos_token="<|im_end|>",
        normalizer={"type": "NFC"},
        add_bos_token=False,
    )


def falcon(folder: Path) -> None:
    digits = {"type": "Digits", "individual_digits": False}
    punctuation = {"type": "Punctuation", "behavior": "Contiguous"}
    write_bpe(
        folder,
        sequence(punctuation, byte_level(), digits, split("[0-9][0-9][0-9]")),
        first=(">>TITLE<<", ">>ABSTRACT<<", ">>QUESTION<<", "<|endoftext|>"),
        eos_token="<|endoftext|>",
    )


def gpt2_with_prefix(folder: Path) -> None:
    """GPT-2's cuts where a text gets a space in front, as RoBERTa and GPT-NeoX can."""
    write_bpe(folder, byte_level(prefix=True), first=("<|endoftext|>",), eos_token="<|endoftext|>")


def opt(folder: Path) -> None:
    """OPT has no tokenizer.json: transformers makes a GPT2Tokenizer of vocab.json and merges.txt."""
    names = ("<s>", "<pad>", "</s>", "<unk>")
    write_bpe(folder, byte_level(), first=names, eos_token="</s>")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    write_json(folder / "vocab.json", model["vocab"])
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"]), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    special = {"__type": "AddedToken", "content": "</s>"} | flags
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "add_prefix_space": False,
        "bos_token": special,
        "eos_token": special,
        "unk_token": special,
        "pad_token": "<pad>",
    }
    write_json(folder / "tokenizer_config.json", config)


LLAMA2_STYLE = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "byte_fallback": True,
    "character_coverage": 0.9995,
}
ESCAPE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def llama2_decoder() -> Json:
    return sequence(
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        kind="decoders",
    )


def sentencepiece_spec(folder: Path, normalizer: Json | None, pre_tokenizer: Json | None) -> Json:
    """tokenizer.json of a BPE tokenizer.model, with merges as transformers' converter derives them."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((folder / "tokenizer.model").read_bytes())
    ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
    merges = []
    for piece in proto.pieces:
        text = piece.piece
        cuts = ((text[:i], text[i:]) for i in range(1, len(text)))
        known = [(left, right) for left, right in cuts if left in ids and right in ids]
        known.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(piece.score, len(left), len(right), left, right) for left, right in known]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    spec = empty_spec(normalizer, pre_tokenizer, llama2_decoder())
    options = {
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
    }
    spec["model"] |= options | {"vocab": ids, "merges": [list(merge[3:]) for merge in merges]}
    for i, piece in enumerate(proto.pieces):
        if piece.type in (2, 3, 4):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            special = {"special": piece.type != 4}
            spec["added_tokens"].append({"id": i, "content": piece.piece, **flags, **special})
    return spec


def llama2(folder: Path) -> None:
    """Also Mistral v1: the dummy space goes before every stretch of text between special tokens."""
    train_sentencepiece(folder, **LLAMA2_STYLE)
    prepend = {"type": "Prepend", "prepend": SPACE}
    spec = sentencepiece_spec(folder, sequence(prepend, ESCAPE, kind="normalizers"), None)
    spec["post_processor"] = framed("<s>", 1)
    write_spec(folder, spec, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def mistral_v3(folder: Path) -> None:
    """The dummy space goes before the text only, which GGUF keys cannot say."""
    train_sentencepiece(folder, control_symbols=["[INST]", "[/INST]"], **LLAMA2_STYLE)
    metaspace = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "first",
        "split": False,
    }
    spec = sentencepiece_spec(folder, None, metaspace)
    spec["post_processor"] = framed("<s>", 1)
    write_spec(folder, spec, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


GEMMA_PIECES = (
    ["<mask>", "<2mass>", "[@BOS@]", "<unused0>", "<unused1>", "<start_of_turn>", "<end_of_turn>"]
    + ["\n" * n for n in range(1, 32)]
    + [SPACE * n for n in range(2, 32)]
    + ["<table>", "</table>", "<h1>", "<code>"]
)


def gemma(folder: Path) -> None:
    train_sentencepiece(
        folder,
        **LLAMA2_STYLE | {"add_dummy_prefix": False},
        user_defined_symbols=GEMMA_PIECES,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        n_pieces=900,
    )
    cuts = {"type": "Split", "pattern": {"String": " "}, "invert": False}
    spec = sentencepiece_spec(folder, ESCAPE, cuts | {"behavior": "MergedWithPrevious"})
    spec["post_processor"] = framed("<bos>", 2)
    spec["decoder"]["decoders"].pop()
    for token in spec["added_tokens"]:
        token["special"] |= token["content"] in ("<start_of_turn>", "<end_of_turn>")
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    write_spec(folder, spec, **names)


def gemma_without_model(folder: Path) -> None:
    """A Gemma checkpoint that lacks tokenizer.model, so that scores must come from the merges."""
    gemma(folder)
    (folder / "tokenizer.model").unlink()


def t5(folder: Path) -> None:
    """SentencePiece unigram behind nmt_nfkc, as T5's converter writes it."""
    train_sentencepiece(folder, model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    spec = unigram_spec(folder)
    spec["post_processor"] = framed("</s>", 1, after=True)
    write_spec(folder, spec, eos_token="</s>", unk_token="<unk>", pad_token="<pad>")


def unigram_spec(folder: Path) -> Json:
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString((folder / "tokenizer.model").read_bytes())
    charsmap = base64.b64encode(proto.normalizer_spec.precompiled_charsmap).decode()
    normalizer = sequence(
        {"type": "Precompiled", "precompiled_charsmap": charsmap},
        {"type": "Strip", "strip_left": False, "strip_right": True},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": SPACE},
        kind="normalizers",
    )
    metaspace = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always"}
    spec = empty_spec(normalizer, metaspace | {"split": True}, metaspace | {"split": True})
    vocab = [[piece.piece, piece.score] for piece in proto.pieces]
    spec["model"] = {"type": "Unigram", "unk_id": 2, "vocab": vocab, "byte_fallback": False}
    for i, piece in enumerate(proto.pieces):
        if piece.type in (2, 3):
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            spec["added_tokens"].append({"id": i, "content": piece.piece, **flags, "special": True})
    return spec


FAMILIES: dict[str, Callable[[Path], None]] = {
    writer.__name__: writer
    for writer in (
        llama3,
        tekken,
        smollm2,
        qwen2,
        falcon,
        gpt2_with_prefix,
        opt,
        llama2,
        mistral_v3,
        gemma,
        gemma_without_model,
        t5,
    )
}
