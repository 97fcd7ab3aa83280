"""A ReLU-sparse checkpoint in transformers, with its FFN blocks at hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from powerinfer_toolkit.artifact import Origin
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.fingerprint import weights_sha256
from powerinfer_toolkit.hub import LocalModel, locate

SPARSE_ACTIVATIONS = ("relu", "fatrelu")
THRESHOLD_KEYS = ("activation_threshold", "hidden_act_param")  # this toolkit's, ProSparse's
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# (layer, residual [n_sequences, n_positions, n_embd], hidden [n_sequences, n_positions, n_ff]) -> hidden or None
OnFfn = Callable[[int, Tensor, Tensor], Tensor | None]


@dataclass(frozen=True)
class FfnBlock:
    """One layer's FFN: `norm`, whose input is the residual stream; `gate`; `down`, whose input is act(gate) * up."""

    norm: Any  # RMSNorm
    gate: nn.Linear
    down: nn.Linear


@dataclass(frozen=True)
class SparseModel:
    """A frozen causal language model whose FFN activations are exactly 0 where neurons do not fire."""

    model: Any
    source: LocalModel
    blocks: list[FfnBlock]
    n_embd: int
    n_ff: int

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.blocks[0].down.weight.device

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Run tokens [n_sequences, n_positions] up to the last norm, without the head."""
        states: Tensor = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        return states

    def origin(self) -> Origin:
        """Return where the weights came from, with their hash."""
        return Origin(self.source.name, self.source.revision, weights_sha256(self.source.path))

    @contextlib.contextmanager
    def tapped(self, on_ffn: OnFfn) -> Iterator[None]:
        """Call `on_ffn` in every layer before its down projection; what it returns replaces hidden."""
        residuals: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[..., None]:
            return lambda _, inputs: residuals.__setitem__(layer, inputs[0])

        def tap(layer: int) -> Callable[..., Tensor | None]:
            return lambda _, inputs: on_ffn(layer, residuals.pop(layer), inputs[0])

        with contextlib.ExitStack() as hooks:
            for layer, block in enumerate(self.blocks):
                hooks.callback(block.norm.register_forward_pre_hook(keep(layer)).remove)
                hooks.callback(block.down.register_forward_pre_hook(tap(layer)).remove)
            yield


def load_sparse_model(
    source: str, *, device: torch.device, dtype: str = "auto", trust_remote_code: bool = False
) -> SparseModel:
    """Load the checkpoint `source`, a directory or `id[@revision]`, for inference.

    `dtype` "auto" is the checkpoint's own on a GPU and float32 elsewhere; `trust_remote_code` runs modelling code
    that lies in the directory. Raises PiError for what cannot be loaded, and for a model whose activation
    never gives zeros.
    """
    local = locate(source)
    config = _read_config(local, trust_remote_code)
    threshold = _sparse_threshold(config, local.name)
    model = _load(local, config, device, dtype, trust_remote_code)
    return SparseModel(
        model,
        local,
        _find_blocks(model, threshold, local.name),
        n_embd=config.hidden_size,
        n_ff=config.intermediate_size,
    )


def load_dense_model(
    source: str, *, device: torch.device, dtype: str = "auto", trust_remote_code: bool = False
) -> Any:  # noqa: ANN401 - transformers' own
    """Load the checkpoint `source` with whatever activation it has, as load_sparse_model() does."""
    local = locate(source)
    return _load(local, _read_config(local, trust_remote_code), device, dtype, trust_remote_code)


@contextlib.contextmanager
def _readable(local: LocalModel) -> Iterator[None]:
    """Turn transformers' ways to refuse a checkpoint into PiError."""
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as failure:
        raise PiError(
            f"cannot load {local.name}: {failure}",
            hint="name the directory of a Hugging Face checkpoint; its own code needs trust_remote_code",
        ) from failure


def _read_config(local: LocalModel, trust_remote_code: bool) -> Any:  # noqa: ANN401
    with _readable(local):
        return transformers.AutoConfig.from_pretrained(
            local.path, trust_remote_code=trust_remote_code
        )


def _load(
    local: LocalModel,
    config: Any,  # noqa: ANN401 - transformers' own
    device: torch.device,
    dtype: str,
    trust_remote_code: bool,
) -> Any:  # noqa: ANN401
    """Return the frozen model on its device."""
    transformers.utils.logging.disable_progress_bar()
    kept = "auto" if device.type == "cuda" else torch.float32
    with _readable(local):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            local.path,
            config=config,
            dtype=kept if dtype == "auto" else DTYPES[dtype],
            trust_remote_code=trust_remote_code,
        )
    return model.to(device).eval().requires_grad_(False)


def _sparse_threshold(config: Any, name: str) -> float:  # noqa: ANN401 - transformers' own
    """Return the threshold on the gate, 0 for plain ReLU, and let transformers load the model as ReLU."""
    activation = getattr(config, "hidden_act", None)
    if activation not in SPARSE_ACTIVATIONS:
        raise PiError(
            f"{name} has the activation {activation!r}: its neurons are never exactly off",
            hint="make it ReLU-sparse with pi-relufy first",
        )
    config.hidden_act = "relu"  # transformers knows no fatrelu
    return max(float(getattr(config, key, None) or 0.0) for key in THRESHOLD_KEYS)


def load_tokenizer(source: LocalModel) -> Any:  # noqa: ANN401 - transformers' own
    """Return the checkpoint's tokenizer. Raises PiError."""
    try:
        return transformers.AutoTokenizer.from_pretrained(source.path)
    except (OSError, ValueError) as failure:
        raise PiError(
            f"{source.name} has no tokenizer that can be read: {failure}",
            hint="put tokenizer.json and tokenizer_config.json beside the weights",
        ) from failure


def _find_blocks(model: Any, threshold: float, name: str) -> list[FfnBlock]:  # noqa: ANN401
    """Return the FFN of every layer by the Llama family's names; FATReLU is put where a threshold is set."""
    blocks = []
    try:
        for layer in model.base_model.layers:
            if threshold > 0:
                layer.mlp.act_fn = nn.Threshold(threshold, 0.0)  # FATReLU: x if x > threshold
            blocks.append(
                FfnBlock(layer.post_attention_layernorm, layer.mlp.gate_proj, layer.mlp.down_proj)
            )
    except AttributeError as failure:
        raise PiError(
            f"{name} is no model of the Llama family: {failure}",
            hint="supported are models with gate_proj, up_proj and down_proj in layers[i].mlp",
        ) from failure
    return blocks
