"""The predictors of several layers as one batch of two-layer networks, without biases.

logit = fc2 relu(fc1 x), a neuron is predicted active iff its logit >= 0. With no bias the decision does not change
when x is scaled by a positive number, so that a predictor trained on x / rms(x) serves on x itself, the residual
stream before the norm, which is what PowerInfer feeds it (docs/predictors.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

_RELATIVE_RIDGE = (
    1e-6  # of the mean eigenvalue: directions that never occur are not blown up further
)


@dataclass(frozen=True)
class Whitening:
    """What makes the inputs of several layers white: with u = x / rms(x), E[root_inverse u (..)^T] = 1.

    `root_inverse`, `root` [n_layers, n_embd, n_embd]; `constant` [n_layers, n_embd]: the direction with
    E(constant . root_inverse u - 1)^2 least, and that error's root in `constant_error` [n_layers].
    """

    root_inverse: Tensor
    root: Tensor
    constant: Tensor
    constant_error: Tensor

    @classmethod
    def of(cls, second_moment: Tensor, mean: Tensor) -> Whitening:
        """From E[u u^T] [n_layers, n_embd, n_embd] and E[u] [n_layers, n_embd], in float64."""
        values, vectors = torch.linalg.eigh(second_moment)
        values = values + _RELATIVE_RIDGE * values.mean(-1, keepdim=True)
        inverse = vectors @ torch.diag_embed(values.rsqrt()) @ vectors.mT
        root = vectors @ torch.diag_embed(values.sqrt()) @ vectors.mT
        constant = (inverse @ mean[..., None])[..., 0]
        error = (1 - constant.square().sum(-1)).clamp(min=0).sqrt()
        return cls(inverse.float(), root.float(), constant.float(), error.float())


class PredictorStack(nn.Module):
    """Predictors of equal rank for n_layers layers, trained on whitened inputs.

    `first` [n_layers, rank, n_embd] times the whitening is fc1, `second` [n_layers, n_ff, rank] is fc2. Hidden
    unit 0 is the constant direction and is not trained: it carries each neuron's bias.
    """

    def __init__(self, whitening: Whitening, rank: int, n_ff: int) -> None:
        super().__init__()
        n_layers, n_embd = whitening.constant.shape
        self.rank = rank
        first = torch.randn(n_layers, rank, n_embd, device=whitening.constant.device)
        first = first / math.sqrt(n_embd)
        first[:, 0] = whitening.constant
        second = torch.randn(n_layers, n_ff, rank, device=first.device) / math.sqrt(rank)
        second[:, :, 0] = 0.0
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)
        self.root_inverse = whitening.root_inverse
        self.first.register_hook(_keep_constant)

    def fc1(self) -> Tensor:
        """Return [n_layers, rank, n_embd] for the residual stream."""
        product: Tensor = self.first @ self.root_inverse
        return product

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [n_layers, n_tokens, n_ff] of x [n_layers, n_tokens, n_embd]."""
        return relu(x @ self.fc1().mT) @ self.second.mT

    @torch.no_grad()
    def set_bias(self, bias: Tensor) -> None:
        """Make `bias` [n_layers, n_ff] each neuron's logit where the rest of the network says nothing."""
        self.second[:, :, 0] = bias

    @torch.no_grad()
    def set_singular_vectors(self, gate: Tensor, whitening: Whitening) -> None:
        """Start from the best low-rank form of `gate` [n_layers, n_ff, n_embd] on these inputs.

        A ReLU network passes a linear form in pairs of units: relu(v z) - relu(-v z) = v z.
        """
        n_pairs = (self.rank - 1) // 2
        left, values, right = torch.linalg.svd(gate @ whitening.root, full_matrices=False)
        right, left = right[:, :n_pairs], (left * values[:, None])[:, :, :n_pairs]
        n_used = 1 + 2 * right.shape[1]
        self.first[:, 1:n_used] = torch.cat([right, -right], dim=1)
        self.second[:, :, 1:n_used] = torch.cat([left, -left], dim=2)
        self.second[:, :, n_used:] = 0.0


def _keep_constant(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[:, 0] = 0.0
    return gradient


@dataclass(frozen=True)
class Predictor:
    """One layer's predictor as it is stored: fc1 [rank, n_embd], fc2 [n_ff, rank], float16.

    What is trained here has the threshold 0; predictors of others may have another.
    """

    fc1: Tensor
    fc2: Tensor
    threshold: float = 0.0

    @classmethod
    def fold(cls, fc1: Tensor, fc2: Tensor, threshold: float) -> Predictor:
        """Move the threshold on the logit of x / rms(x) into the constant unit, so that it becomes 0.

        Rows of fc1 get length 1 and rows of fc2 a largest element of 1, which no decision depends on.
        """
        fc2 = fc2.clone()
        fc2[:, 0] -= threshold
        lengths = fc1.norm(dim=1).clamp(min=1e-30)
        fc1, fc2 = fc1 / lengths[:, None], fc2 * lengths
        fc2 = fc2 / fc2.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
        return cls(fc1.half(), fc2.half())

    @property
    def n_parameters(self) -> int:
        """Number of weights."""
        return self.fc1.numel() + self.fc2.numel()

    def predicts(self, residual: Tensor) -> Tensor:
        """Return which neurons are let through [..., n_ff] for the raw residual stream [..., n_embd]."""
        hidden = relu(residual.float() @ self.fc1.float().mT)
        return hidden @ self.fc2.float().mT >= self.threshold


def unit_rms(x: Tensor) -> Tensor:
    """Return x [..., n_embd] with root mean square 1, float32."""
    x = x.float()
    return x * x.square().mean(-1, keepdim=True).clamp(min=1e-30).rsqrt()
