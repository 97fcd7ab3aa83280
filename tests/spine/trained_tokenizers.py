"""Small tokenizers trained at run time and saved as checkpoints save them; keys as a `get` function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.tokenizer_keys import tokenizer_metadata
from spine.tokenizer_texts import training_lines

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_STYLE = {
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "byte_fallback": True,
    "character_coverage": 0.9995,
}
Get = Callable[[str], Any]


def train_byte_level(
    folder: Path,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None = None,
    *,
    adds_bos: bool = False,
) -> Path:
    """A byte-level BPE tokenizer of 1,200 tokens with chat tokens, one user-defined token at the end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_lines(), trainer)
    tokenizer.add_tokens(["<user é token>"])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "unk_token": "<|endoftext|>",
    }
    write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def train_sentencepiece(
    folder: Path, n_pieces: int = 800, **options: Any
) -> sentencepiece.SentencePieceProcessor:
    """Write tokenizer.model to `folder` and return SentencePiece's own processor."""
    folder.mkdir(exist_ok=True)
    lines = (line for text in training_lines() for line in text.splitlines())
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=str(folder / "tokenizer"),
        vocab_size=n_pieces,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.vocab").unlink()
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def embedded_and_rebuilt(folder: Path, n_vocab: int) -> dict[str, Get]:
    """The metadata of a converted file, whole and as another tool would write it: without our key."""
    keys = tokenizer_metadata(folder, n_vocab).keys
    values = {e.name: e.value if e.element_type is None else list(e.value) for e in keys}
    foreign = {name: value for name, value in values.items() if name != Key.TOKENIZER_JSON}
    return {"embedded": values.get, "rebuilt": foreign.get}
