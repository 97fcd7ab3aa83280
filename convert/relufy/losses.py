"""Cross-entropy and KL to a teacher, chunk by chunk, so that [tokens, vocabulary] is never in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class LossWeights:
    """Weights of the two terms and the temperature of the KL term."""

    ce: float
    kl: float
    temperature: float = 1.0


class LanguageLoss(NamedTuple):
    """Means over tokens, in nats: `total` is differentiable, the parts are not."""

    total: Tensor
    ce: Tensor
    kl: Tensor


def language_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: LossWeights,
    chunk_tokens: int,
    teacher: tuple[Tensor, Tensor] | None = None,
) -> LanguageLoss:
    """Return w.ce * CE + w.kl * T^2 * KL(teacher || student), both as means over the tokens.

    hidden [tokens, d] and head [vocabulary, d] belong to the student, labels [tokens] are the next tokens,
    `teacher` is the same pair of the teacher. Logits exist for `chunk_tokens` tokens at a time, in float32 at
    least; gradients are made in the same pass, since keeping or recomputing the logits would cost more. The
    temperature's square keeps the KL gradient's size (Hinton et al., arXiv 1503.02531).
    """
    if weights.kl == 0:
        teacher = None
    parts = _LanguageLoss.apply(hidden, head, labels, teacher, weights, chunk_tokens)
    return LanguageLoss(*parts)


class _LanguageLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        teacher: tuple[Tensor, Tensor] | None,
        weights: LossWeights,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = _compute_dtype(hidden)
        wide = torch.promote_types(dtype, torch.float32)
        student = (hidden.detach().to(dtype), head.detach().to(dtype))
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(student[0]) if needs_hidden else None
        d_head = torch.zeros_like(head, dtype=wide) if needs_head else None
        sums = torch.zeros(2, dtype=wide, device=hidden.device)
        n_tokens = hidden.shape[0]
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, n_tokens, chunk_tokens):
                part = slice(start, start + chunk_tokens)
                ce, kl, d_logits = _chunk(
                    student[0][part], student[1], labels[part], _part(teacher, part), weights
                )
                sums += torch.stack((ce, kl))
                d_logits = (d_logits / n_tokens).to(dtype)
                if d_hidden is not None:
                    torch.matmul(d_logits, student[1], out=d_hidden[part])
                if d_head is not None:
                    d_head += d_logits.T @ student[0][part]
        ctx.gradients = (d_hidden, d_head)
        ctx.dtypes = (hidden.dtype, head.dtype)
        ce, kl = (sums / n_tokens).unbind()
        ctx.mark_non_differentiable(ce, kl)
        return weights.ce * ce + weights.kl * weights.temperature**2 * kl, ce, kl

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        gradients = zip(ctx.gradients, ctx.dtypes, strict=True)
        scaled = [None if g is None else (g * d_total).to(dtype) for g, dtype in gradients]
        return *scaled, None, None, None, None


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the type that autocast would multiply in."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _part(teacher: tuple[Tensor, Tensor] | None, part: slice) -> tuple[Tensor, Tensor] | None:
    return None if teacher is None else (teacher[0][part], teacher[1])


def _chunk(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    teacher: tuple[Tensor, Tensor] | None,
    weights: LossWeights,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of CE and KL over a chunk and d(sum)/d(logits) [tokens, vocabulary]."""
    logits = F.linear(hidden, head)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = F.log_softmax(logits, dim=-1)
    index = labels[:, None]
    ce = -log_p.gather(1, index).sum()
    d_logits = log_p.exp().mul_(weights.ce)
    d_logits.scatter_add_(1, index, torch.full_like(index, -weights.ce, dtype=d_logits.dtype))
    if teacher is None:
        return ce, torch.zeros_like(ce), d_logits
    temperature = weights.temperature
    if temperature != 1:
        log_p = F.log_softmax(logits / temperature, dim=-1)
    log_q = F.log_softmax(F.linear(*teacher).to(log_p.dtype) / temperature, dim=-1)
    q = log_q.exp()
    kl = (q * (log_q - log_p)).sum()
    d_logits.add_(log_p.exp_().sub_(q), alpha=weights.kl * temperature)
    return ce, kl, d_logits
