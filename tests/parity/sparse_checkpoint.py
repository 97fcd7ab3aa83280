"""A tiny ReLU model whose FFN matters and whose neurons are mostly off and can be guessed; text that it wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from parity.checkpoints import save_checkpoint, torch, transformers

N_EMBD, N_FF, N_LAYERS, N_VOCAB = 48, 160, 3, 293
N_POSITIONS = 64
BIAS = 3.0  # of residual dimension 0, the same in every token


def write_sparse_checkpoint(folder: Path, n_blocks: int = 128, seed: int = 0) -> Path:
    """Saves the checkpoint and folder/tokens.npy: blocks of 64 tokens drawn from the model itself."""
    folder.mkdir(parents=True, exist_ok=True)
    model = sparse_model(seed)
    save_checkpoint(model, folder)
    np.save(folder / "tokens.npy", draw_text(model, n_blocks, seed).reshape(-1).astype(np.uint16))
    return folder


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


@torch.no_grad()
def draw_text(model: transformers.PreTrainedModel, n_blocks: int, seed: int) -> np.ndarray:
    """[n_blocks, 64] tokens, none of them special."""
    torch.manual_seed(seed + 1)
    tokens = torch.randint(3, N_VOCAB, (n_blocks, 1))
    while tokens.shape[1] < N_POSITIONS:
        logits = model(tokens).logits[:, -1]
        logits[:, :3] = -torch.inf
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return tokens.numpy()
