"""A tiny random model with a tokenizer, and text in a language of few words: a recipe without a download."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerinfer_toolkit.artifact import writing
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.settings import setting
from powerinfer_toolkit.training.sources import check_seed

SYLLABLES = ("ba", "du", "fe", "go", "ki", "lo", "mu", "na", "pe", "ri", "so", "tu", "ve", "wi")
END_OF_TEXT = "<|endoftext|>"
N_HEADS = 4
N_WORDS, N_FOLLOWERS = 64, 6  # the language: after a word comes one of a few


@dataclass(frozen=True)
class SyntheticSettings:
    """A random Llama with a byte-level tokenizer, and documents to train it on."""

    hidden_size: int = setting(64, "width of the model")
    intermediate_size: int = setting(192, "neurons of a layer")
    num_hidden_layers: int = setting(2, "layers")
    documents: int = setting(400, "documents of text, of 40 to 120 words")
    seed: int = setting(0, "seed of weights and text")

    def __post_init__(self) -> None:
        """Refuse sizes that no model can have (UsageError)."""
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "documents"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", hint="give 1 or more")
        check_seed(self.seed)
        if self.hidden_size % (2 * N_HEADS):  # RoPE turns pairs within a head
            raise UsageError(
                f"hidden_size is {self.hidden_size}", hint=f"give a multiple of {2 * N_HEADS}"
            )


def make(settings: SyntheticSettings, folder: Path) -> None:
    """Write a Hugging Face checkpoint and text.jsonl into `folder`; the same settings give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = documents(settings)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = _tokenizer()
    model = _model(settings, len(tokenizer))
    with writing(folder):
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)


def documents(settings: SyntheticSettings) -> list[str]:
    """Return documents in which every word is followed by one of N_FOLLOWERS, so that there is something to learn."""
    draw = random.Random(settings.seed)
    words = ["".join(draw.choices(SYLLABLES, k=draw.randint(1, 3))) for _ in range(N_WORDS)]
    followers = {word: draw.choices(words, k=N_FOLLOWERS) for word in words}
    texts = []
    for _ in range(settings.documents):
        text = [draw.choice(words)]
        for _ in range(draw.randint(40, 120)):
            text.append(draw.choice(followers[text[-1]]))
        texts.append(" ".join(text))
    return texts


def _tokenizer() -> Any:  # noqa: ANN401 - transformers' own
    """Return a tokenizer of bytes, without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, END_OF_TEXT])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def _model(settings: SyntheticSettings, n_vocab: int) -> Any:  # noqa: ANN401
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=n_vocab,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=N_HEADS,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=n_vocab - 1,
    )
    return LlamaForCausalLM(config)
