"""Configuration of Bamboo: Mistral's shape, with ReLU on both branches of the FFN (dReLU)."""

from transformers import MistralConfig


class BambooConfig(MistralConfig):
    """As MistralConfig; `hidden_act` is applied to gate and up."""

    model_type = "bamboo"
