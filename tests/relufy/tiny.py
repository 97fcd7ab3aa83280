"""A tiny Llama with a tokenizer, text to train it on, and the settings of a run of seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [
    "the",
    "a",
    "one",
    "cat",
    "dog",
    "tree",
    "river",
    "stone",
    "runs",
    "sees",
    "finds",
    "old",
    "new",
    "red",
    "blue",
    "and",
    "or",
    "but",
    "then",
]
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def write_model(folder: Path, **changes: object) -> Path:
    """Write a random float32 Llama of 2 layers, 32 wide, with a byte-level tokenizer."""
    torch.manual_seed(0)
    values = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "eos_token_id": 256,
    }
    model = LlamaForCausalLM(LlamaConfig(**values | changes))
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder


def sentences(n_documents: int, seed: int = 0) -> list[str]:
    """Return documents of random words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(20, 60))) for _ in range(n_documents)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    """Write one {"text": ...} a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def run_settings(folder: Path, **changes: object) -> dict[str, object]:
    """Write model and data below `folder`; return the settings of a run into folder/out."""
    if not (folder / "model").exists():
        write_model(folder / "model")
    data = folder / "text.jsonl"
    if not data.exists():
        write_jsonl(data, sentences(200))
    values: dict[str, object] = {
        "model_name_or_path": str(folder / "model"),
        "output_dir": str(folder / "out"),
        "dataset_mixture": [{"path": str(data)}],
        "held_out_share": 0.1,
        "eval_blocks": 4,
        "max_length": 32,
        "per_device_train_batch_size": 4,
        "max_steps": 8,
        "save_steps": 2,
        "eval_steps": 4,
        "logging_steps": 2,
        "sparsity_target": 0.8,
        "sparsity_lambda_init": 0.01,
        "bf16": False,
    }
    return values | changes
