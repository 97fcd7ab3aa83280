"""From the dense model to the student: which activation where, which adapters, and how it is saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from powerinfer_toolkit.convert.relufy import bamboo
from powerinfer_toolkit.convert.relufy.settings import RelufySettings, Variant
from powerinfer_toolkit.convert.relufy.sparsity import ADAPTER, gated_mlps
from powerinfer_toolkit.errors import PiError, UsageError

RELU_ACTIVATIONS = ("relu", "fatrelu")
THRESHOLD_KEY = "activation_threshold"  # in config.json: h is 0 unless the gate is above
BAMBOO_FILES = ("configuration_bamboo.py", "modeling_bamboo.py")
# A head that is more than a matrix: the loss would have to follow it.
UNSUPPORTED_HEADS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class FatReLU(nn.Module):
    """x where x > threshold, else 0 (ProSparse's FATReLU)."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of x's shape."""
        return x * (x > self.threshold)


def read_config(path: Path) -> Any:  # noqa: ANN401 - transformers' own
    """Return the configuration of a checkpoint. Raises PiError where this stage cannot train it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as failure:
        raise PiError(
            f"{path} is no checkpoint that transformers knows: {failure}",
            hint="name a folder with config.json and model.safetensors, or owner/model of the hub",
        ) from failure
    if not hasattr(config, "hidden_act"):
        raise PiError(
            f"a {config.model_type} model has no hidden_act to swap",
            hint="Llama and Mistral models are supported",
        )
    for key in UNSUPPORTED_HEADS:
        if getattr(config, key, None) not in (None, 1.0):
            raise PiError(
                f"{path}: models with {key} are not supported",
                hint="Llama and Mistral models are supported",
            )
    return config


def check_variant(settings: RelufySettings, hidden_act: str) -> None:
    """Refuse what makes no sense for a model with this activation. Raises UsageError."""
    if hidden_act in RELU_ACTIVATIONS and settings.variant in (Variant.REGLU, Variant.DRELU):
        raise UsageError(
            f"the activation of {settings.model_name_or_path} is {hidden_act} already",
            hint="variant fatrelu trains it on and finds a threshold for it",
        )


def load_model(path: Path, config: Any, dtype: torch.dtype, attention: str) -> Any:  # noqa: ANN401
    """Return a causal language model with the weights in `path`. Raises PiError."""
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM
    if config.model_type == "bamboo":
        from powerinfer_toolkit.convert.relufy.bamboo.modeling_bamboo import BambooForCausalLM

        model_class = BambooForCausalLM
    try:
        model = model_class.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=attention
        )
    except (OSError, ValueError, ImportError) as failure:
        raise PiError(
            f"cannot load {path}: {failure}",
            hint="check that all of its files are there; safetensors only, no pickle",
        ) from failure
    model.config.use_cache = False
    return model


def student_config(settings: RelufySettings, path: Path) -> Any:  # noqa: ANN401
    """Return the configuration of the student. Raises PiError."""
    config = read_config(path)
    check_variant(settings, config.hidden_act)
    if settings.variant == Variant.DRELU:
        return _bamboo_config(config)
    if settings.variant != Variant.DENSE:
        config.hidden_act = "relu"
    return config


def _bamboo_config(config: Any) -> Any:  # noqa: ANN401
    """Return the configuration of a Llama or Mistral model as Bamboo's."""
    from powerinfer_toolkit.convert.relufy.bamboo.configuration_bamboo import BambooConfig

    biases = [key for key in ("attention_bias", "mlp_bias") if getattr(config, key, False)]
    if config.model_type not in ("llama", "mistral") or biases:
        what = ", ".join(biases) or config.model_type
        raise PiError(
            f"drelu is for Llama and Mistral models without biases, not {what}",
            hint="variant: reglu works for others",
        )
    dropped = ("model_type", "architectures", "transformers_version", "attention_bias", "mlp_bias")
    values = {key: value for key, value in config.to_dict().items() if key not in dropped}
    values |= {"hidden_act": "relu", "sliding_window": getattr(config, "sliding_window", None)}
    return BambooConfig(**values)


def set_threshold(model: nn.Module, threshold: float) -> None:
    """Let the gate's activation be FATReLU with this threshold, plain ReLU for 0."""
    for mlp in gated_mlps(model):
        mlp.act_fn = FatReLU(threshold) if threshold else nn.ReLU()


def add_adapters(model: Any, settings: RelufySettings) -> Any:  # noqa: ANN401
    """Return the model with trainable low-rank adapters, everything else frozen. Raises PiError."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.lora_target_modules,
    )
    try:
        return get_peft_model(model, config, adapter_name=ADAPTER)
    except ValueError as failure:
        raise PiError(
            f"cannot add adapters: {failure}", hint="check lora_target_modules"
        ) from failure


def saved_dtype(settings: RelufySettings, config: Any) -> torch.dtype:  # noqa: ANN401
    """Return the type that weights are saved in."""
    if settings.save_dtype != "auto":
        dtype = getattr(torch, settings.save_dtype)
    else:
        dtype = getattr(config, "dtype", None) or torch.float32
    assert isinstance(dtype, torch.dtype)
    return dtype


def save_checkpoint(
    model: Any,  # noqa: ANN401
    state: dict[str, Tensor],
    folder: Path,
    *,
    dtype: torch.dtype,
    threshold: float,
) -> None:
    """Write config.json and the weights, which stock transformers loads, into `folder`.

    A threshold goes into config.json under a key that stock transformers ignores: it then runs plain ReLU,
    whose few more small activations change the perplexity by less than the calibration allowed. dReLU has
    no stock class; its code lies beside the weights (trust_remote_code).
    """
    fresh = type(model)(model.config).to(dtype)
    fresh.load_state_dict(state)
    fresh.generation_config = model.generation_config
    if threshold:
        setattr(fresh.config, THRESHOLD_KEY, threshold)
    fresh.config.use_cache = True
    if fresh.config.model_type == "bamboo":
        _add_bamboo_code(fresh.config, folder)
    fresh.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):  # made readable for their owner only
        path.chmod((folder / "config.json").stat().st_mode)


def _add_bamboo_code(config: Any, folder: Path) -> None:  # noqa: ANN401
    """Write the modelling code, whose two files find each other there by a relative import."""
    config.auto_map = {
        "AutoConfig": "configuration_bamboo.BambooConfig",
        "AutoModelForCausalLM": "modeling_bamboo.BambooForCausalLM",
    }
    source = Path(bamboo.__file__).parent
    shutil.copyfile(source / BAMBOO_FILES[0], folder / BAMBOO_FILES[0])
    code = (source / BAMBOO_FILES[1]).read_text(encoding="utf-8")
    code = code.replace(f"from {bamboo.__name__}.", "from .")
    (folder / BAMBOO_FILES[1]).write_text(code, encoding="utf-8")
