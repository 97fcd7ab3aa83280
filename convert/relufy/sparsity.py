"""What the FFN neurons do in a forward pass: how many are zero, and what the active ones would cost."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from powerinfer_toolkit.errors import PiError

ADAPTER = "default"
SMALLEST_MEAN = 1e-12  # of a token without an active neuron, whose logarithm is wanted


class Reading(NamedTuple):
    """Sums over the tokens of one forward pass, an entry a layer.

    `penalty` is the sum that SparsityProbe describes and differentiable; `active` counts h_i != 0; `tokens`
    and `neurons` are the numbers behind them.
    """

    penalty: Tensor
    active: Tensor
    tokens: int
    neurons: int


def gated_mlps(model: nn.Module) -> list[nn.Module]:
    """Return the FFN modules in layer order: those with gate_proj, up_proj, down_proj and act_fn."""
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    found = [m for m in model.modules() if all(hasattr(m, part) for part in parts)]
    if not found:
        raise PiError(
            "the model has no gated FFN (gate_proj, up_proj, down_proj, act_fn)",
            hint="models of the Llama, Mistral and Qwen families have",
        )
    return found


class SparsityProbe:
    """Watches the input of every down projection, h = act(gate) * up, [batch, tokens, neurons].

    A plain L1 norm of h can be lowered without a single new zero, by scaling up_proj down and down_proj up;
    weighting |h_i| with the norm of down_proj's column i, held constant in the gradient, closes that way:
    c_i = |h_i| * ||down_i||.

    The penalty of a token is sum c_i at concavity 0. That pulls at large contributions as much as at small
    ones, though only small ones become zero cheaply, and most of all at those of the attention sink, hundreds
    of times the usual size. With concavity k it is a soft count of active neurons,
    sum log(1 + k c_i / a) / log(1 + k), whose slope falls with c_i as the count's does (Candes et al.,
    arXiv 0711.1612); a is the layer's typical contribution of an active neuron, constant in the gradient.
    """

    def __init__(self, model: nn.Module, concavity: float = 0.0) -> None:
        self.layers: list[nn.Module] = [mlp.get_submodule("down_proj") for mlp in gated_mlps(model)]
        measure = functools.partial(_measure, concavity=concavity)
        self._handles = [layer.register_forward_pre_hook(measure) for layer in self.layers]

    def read(self) -> Reading:
        """Return what the last forward pass did, and forget it."""
        measured = [layer.__dict__.pop("measured") for layer in self.layers]
        penalty, active = zip(*measured, strict=True)
        return Reading(
            torch.stack([p.float().sum() for p in penalty]),
            torch.stack([a.sum() for a in active]),
            tokens=active[0].numel(),
            neurons=_down_weight(self.layers[0]).shape[1],
        )

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()


def _measure(layer: nn.Module, inputs: tuple[Tensor, ...], *, concavity: float) -> None:
    """Keep penalty and active neurons a token on the module itself.

    On the module, not in a list of layers, so that one compiled graph serves all layers; recomputation
    under gradient checkpointing writes there again, after the pass has been read.
    """
    (h,) = inputs
    norms = _down_weight(layer).norm(dim=0).to(h.dtype)
    active = (h != 0).sum(-1)
    penalty = _soft_count(h.abs() * norms, active, concavity) if concavity else h.abs() @ norms
    object.__setattr__(layer, "measured", (penalty, active))


def _soft_count(contribution: Tensor, active: Tensor, concavity: float) -> Tensor:
    """Return the log penalty [batch, tokens] of contributions [batch, tokens, neurons].

    The typical contribution is the geometric mean over tokens of each token's mean over active neurons: a
    few tokens of any size hardly move it.
    """
    c = contribution.float()
    means = c.detach().sum(-1) / active.clamp(min=1)
    typical = means.clamp(min=SMALLEST_MEAN).log().mean().exp()
    return torch.log1p(concavity / typical * c).sum(-1) / math.log1p(concavity)


def _down_weight(layer: nn.Module) -> Tensor:
    """Return the detached weight [d, neurons] that the projection multiplies with, adapter included."""
    if not hasattr(layer, "base_layer"):
        weight = layer.weight
        assert isinstance(weight, Tensor)
        return weight.detach()
    with torch.no_grad():
        base: Tensor = layer.base_layer.weight.detach()  # type: ignore[union-attr,operator]
        return base + layer.get_delta_weight(ADAPTER).detach()  # type: ignore[operator,no-any-return]
