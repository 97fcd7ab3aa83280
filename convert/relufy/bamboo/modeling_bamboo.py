"""Bamboo: Mistral with down(relu(gate(x)) * relu(up(x))), dReLU of TurboSparse (arXiv 2406.05955)."""

import torch
from torch import nn
from transformers import MistralForCausalLM
from transformers.activations import ACT2FN

from powerinfer_toolkit.convert.relufy.bamboo.configuration_bamboo import BambooConfig


class BambooMLP(nn.Module):
    """FFN with the activation on gate and up."""

    def __init__(self, config: BambooConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., hidden_size] for x [..., hidden_size]."""
        out: torch.Tensor = self.down_proj(
            self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x))
        )
        return out


class BambooForCausalLM(MistralForCausalLM):
    """Mistral with BambooMLP in every layer."""

    config_class = BambooConfig

    def __init__(self, config: BambooConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = BambooMLP(config)
        self.post_init()
