"""A tiny ReLU model whose FFN matters and whose neurons are mostly off and can be guessed; text that it wrote.

Its tokens are bytes, so that text and tokens are the same; each document fills a block of 64 with the separator.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers

from parity.checkpoints import save_checkpoint, torch, transformers

N_EMBD, N_FF, N_LAYERS, N_VOCAB = 48, 160, 3, 3 + 256  # three special tokens and the bytes
N_POSITIONS = 64
BIAS = 3.0  # of residual dimension 0, the same in every token


def write_sparse_checkpoint(folder: Path, n_blocks: int = 128, seed: int = 0) -> Path:
    """Saves the checkpoint, and documents drawn from the model itself in folder/text.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    model = sparse_model(seed)
    save_checkpoint(model, folder)
    texts = draw_texts(model, tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json"), n_blocks)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "text.jsonl").write_text("".join(lines))
    return folder


def text_of(folder: Path) -> list[dict[str, str]]:
    """What dataset_mixture says of the documents."""
    return [{"path": f"{folder}/text.jsonl"}]


def blocks_of(folder: Path) -> np.ndarray:
    """The documents with their separators [n_blocks, 64]."""
    tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
    rows = [[*tokenizer.encode(text, add_special_tokens=False).ids, 2] for text in texts]
    return np.asarray(rows, np.uint32)


def sparse_model(seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_act="relu",
        hidden_size=N_EMBD,
        intermediate_size=N_FF,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=N_VOCAB,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, torch.randn_like(parameter)))
        model.model.embed_tokens.weight[:, 0] = BIAS
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight.copy_(_gate())
    return model


def _values(name: str, noise: torch.Tensor) -> torch.Tensor:
    if noise.ndim == 1:
        return 1 + 0.2 * noise
    if "embed" in name:
        return noise
    size = {"down_proj": 4.0, "lm_head": 2.0, "o_proj": 0.5}
    return next((s for key, s in size.items() if key in name), 1.0) * noise / noise.shape[1] ** 0.5


def _gate() -> torch.Tensor:
    """Rows in a space of few dimensions, whose bias keeps most gates closed."""
    low = torch.randn(N_FF, 6) @ torch.randn(6, N_EMBD) / (6 * N_EMBD) ** 0.5
    gate = low + 0.1 * torch.randn(N_FF, N_EMBD) / N_EMBD**0.5
    gate[:, 0] = -0.45
    return gate


def draw_texts(
    model: transformers.PreTrainedModel, tokenizer: tokenizers.Tokenizer, n_texts: int
) -> list[str]:
    """Texts of 63 letters, digits and marks, none of them a space at an end."""
    torch.manual_seed(1)
    letters = [tokenizer.token_to_id(chr(code)) for code in range(33, 127)]
    others = sorted(set(range(N_VOCAB)) - set(letters))
    first = torch.as_tensor(letters)[torch.randint(len(letters), (n_texts, 1))]
    tokens = model.generate(
        first,
        attention_mask=torch.ones_like(first),
        do_sample=True,
        top_k=0,
        max_new_tokens=N_POSITIONS - 2,
        suppress_tokens=others,
        pad_token_id=0,
    )
    return [tokenizer.decode(row, skip_special_tokens=False) for row in tokens.tolist()]
