"""What a group of layers sees and does at a batch of tokens, and what missing each activation would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from powerinfer_toolkit.train_predictor.network import unit_rms
from powerinfer_toolkit.train_predictor.settings import CONTRIBUTION, GRADIENT, PredictorSettings
from powerinfer_toolkit.training.checkpoint import SparseModel

GATE_SHARE = (
    1 / 3
)  # of a neuron's bytes: what is read for a neuron that is predicted and does not fire
_HEAD_TOKENS = 2048  # whose logits exist at a time
_FLOAT16_SCALE = 1024.0  # keeps small gradients out of float16's subnormal numbers
# The cheap costs, in prices of a neuron: a false alarm of 1/3 weighs 0.05 of a mean miss, and a miss at most 10 means.
_MEAN_MISS = GATE_SHARE / 0.05
_LARGEST_MISS = 10 * _MEAN_MISS


@dataclass(frozen=True)
class Captured:
    """Tokens of a batch: `inputs` [n_layers, n_tokens, n_embd] with rms 1, `hidden` and, where it was asked for,
    `gradient` of the sampled labels' loss in nats [n_layers, n_tokens, n_ff]."""

    inputs: Tensor
    hidden: Tensor
    gradient: Tensor | None

    def part(self, number: int, n_parts: int) -> Captured:
        """Return every n_parts-th token from `number` on."""
        chosen = slice(number, None, n_parts)
        gradient = None if self.gradient is None else self.gradient[:, chosen]
        return Captured(self.inputs[:, chosen], self.hidden[:, chosen], gradient)


def capture(
    model: SparseModel,
    tokens: Tensor,
    layers: Sequence[int],
    *,
    generator: torch.Generator | None = None,
) -> Captured:
    """Run tokens [n_sequences, n_positions]; return all but position 0 of the given layers.

    With a generator a label is drawn from the model's own distribution at every position, and the gradient of
    their summed loss is taken: one backward pass, in which no weight takes part.
    """
    inputs: list[Tensor] = []
    hiddens: list[Tensor] = []
    wanted = set(layers)

    def tap(layer: int, residual: Tensor, hidden: Tensor) -> Tensor | None:
        if layer not in wanted:
            return None
        inputs.append(unit_rms(residual.detach()[:, 1:]).flatten(0, 1))
        if generator is not None:
            hidden.requires_grad_() if hidden.is_leaf else hidden.retain_grad()
        hiddens.append(hidden)
        return hidden

    with torch.set_grad_enabled(generator is not None), model.tapped(tap):
        states = model.hidden_states(tokens)
    gradient = None
    if generator is not None:
        scale = _FLOAT16_SCALE if states.dtype == torch.float16 else 1.0
        states.backward(_state_gradient(model, states.detach(), generator) * scale)
        gradients = [h.grad[:, 1:].flatten(0, 1) for h in hiddens if h.grad is not None]
        gradient = torch.stack(gradients).float() / scale
    hidden = torch.stack([h.detach()[:, 1:].flatten(0, 1) for h in hiddens])
    return Captured(torch.stack(inputs), hidden, gradient)


def _state_gradient(model: SparseModel, states: Tensor, generator: torch.Generator) -> Tensor:
    """Return d(sum of -log p(label)) / d states [n_sequences, n_positions, n_embd], labels drawn from p."""
    head = model.model.lm_head
    gradients = []
    for chunk in states.flatten(0, 1).split(_HEAD_TOKENS):
        p = head(chunk).float().softmax(-1)
        p.scatter_add_(1, draw(p, generator), -torch.ones_like(p[:, :1]))  # d(-log p) / d logits
        gradients.append(p.to(chunk.dtype) @ head.weight)
    return torch.cat(gradients).view_as(states)


def draw(p: Tensor, generator: torch.Generator) -> Tensor:
    """Return a label [n, 1] a row of p [n, n_labels]: the first of exponential clocks with rates p to ring."""
    clocks = torch.empty_like(p).exponential_(generator=generator)
    return clocks.div_(p).argmin(-1, keepdim=True)


@dataclass(frozen=True)
class Costs:
    """Of a batch, in prices of a neuron: `miss` of dropping it, `read` of letting it through; both
    [n_layers, n_tokens, n_ff]. Where it does not fire, a miss costs nothing and a third of it is read."""

    miss: Tensor
    read: Tensor


class CostModel:
    """Turns what was captured into costs."""

    def __init__(self, settings: PredictorSettings, model: SparseModel) -> None:
        self._kind = settings.predictor_loss
        self._neuron_price = settings.byte_price / model.n_ff  # nats
        self._clip = settings.cost_clip
        self.needs_gradient = self._kind == GRADIENT
        down = [block.down.weight.float().norm(dim=0) for block in model.blocks]
        self._down_norms = torch.stack(down)  # [n_layers, n_ff]

    def of(self, captured: Captured, layers: Sequence[int]) -> Costs:
        """Return the costs of the tokens of `layers`."""
        hidden = captured.hidden.float()
        fires = (hidden != 0).float()
        if captured.gradient is not None:
            miss = (hidden * captured.gradient).square() / (2 * self._neuron_price)
            miss = miss.clamp(max=self._clip)
        elif self._kind == CONTRIBUTION:
            size = hidden.abs() * self._down_norms[list(layers), None]
            mean = size.sum((1, 2), keepdim=True) / fires.sum((1, 2), keepdim=True).clamp(min=1)
            miss = (size / mean * _MEAN_MISS).clamp(max=_LARGEST_MISS)
        else:
            miss = fires * _MEAN_MISS
        return Costs(miss, GATE_SHARE + (1 - GATE_SHARE) * fires)
