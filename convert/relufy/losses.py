"""Cross-entropy and KL to a teacher, chunk by chunk, so that [tokens, vocabulary] is never in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Chunk = Callable[..., tuple[Tensor, Tensor, Tensor]]


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
    *,
    compiled: bool = False,
) -> LanguageLoss:
    """Return w.ce * CE + w.kl * T^2 * KL(teacher || student), both as means over the tokens.

    hidden [tokens, d] and head [vocabulary, d] belong to the student, labels [tokens] are the next tokens,
    `teacher` is the same pair of the teacher. Logits exist for at most `chunk_tokens` tokens at a time, in
    float32 at least; gradients are made in the same pass, since keeping or recomputing the logits would cost
    more. The temperature's square keeps the KL gradient's size (Hinton et al., arXiv 1503.02531).
    `compiled` fuses the passes over a chunk's logits.
    """
    if weights.kl == 0:
        teacher = None
    chunk = _compiled_chunk() if compiled else _chunk
    parts = _LanguageLoss.apply(hidden, head, labels, teacher, weights, chunk_tokens, chunk)
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
        chunk: Chunk,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = _compute_dtype(hidden)
        wide = torch.promote_types(dtype, torch.float32)
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        ctx.dtypes = (hidden.dtype, head.dtype)
        hidden, head = hidden.detach().to(dtype), head.detach().to(dtype)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_head = torch.zeros_like(head, dtype=wide) if needs_head else None
        sums = torch.zeros(2, dtype=wide, device=hidden.device)
        n_tokens = hidden.shape[0]
        step = math.ceil(n_tokens / math.ceil(n_tokens / chunk_tokens))  # chunks of one size
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, n_tokens, step):
                part = slice(start, start + step)
                t_part = None if teacher is None else (teacher[0][part], teacher[1])
                ce, kl, d_logits = chunk(
                    hidden[part], head, labels[part], t_part, weights, needs_hidden or needs_head
                )
                sums += torch.stack((ce, kl))
                if d_hidden is not None:
                    torch.matmul(d_logits, head, out=d_hidden[part])
                if d_head is not None:
                    d_head += d_logits.T @ hidden[part]
        ctx.gradients, ctx.n_tokens = (d_hidden, d_head), n_tokens
        ce, kl = (sums / n_tokens).unbind()
        ctx.mark_non_differentiable(ce, kl)
        return weights.ce * ce + weights.kl * weights.temperature**2 * kl, ce, kl

    @staticmethod
    def backward(ctx: Any, d_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        gradients = zip(ctx.gradients, ctx.dtypes, strict=True)
        scale = d_total / ctx.n_tokens
        scaled = [None if g is None else (g.to(scale.dtype) * scale).to(t) for g, t in gradients]
        return *scaled, None, None, None, None, None


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the type that autocast would multiply in."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _chunk(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    teacher: tuple[Tensor, Tensor] | None,
    weights: LossWeights,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of CE and KL over a chunk and, in hidden's type, d(sum)/d(logits) [tokens, vocabulary]."""
    logits = F.linear(hidden, head)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_p = F.log_softmax(logits, dim=-1)
    index = labels[:, None]
    ce = -log_p.gather(1, index).sum()
    kl, d_logits = torch.zeros_like(ce), ce
    if needs_gradient:
        d_logits = weights.ce * log_p.exp()
        d_logits.scatter_add_(1, index, torch.full_like(index, -weights.ce, dtype=log_p.dtype))
    if teacher is not None:
        temperature = weights.temperature
        target = F.linear(*teacher).to(log_p.dtype)
        if temperature != 1:
            log_p, target = F.log_softmax(logits / temperature, dim=-1), target / temperature
        log_q = F.log_softmax(target, dim=-1)
        q = log_q.exp()
        kl = (q * (log_q - log_p)).sum()
        if needs_gradient:
            d_logits = d_logits + weights.kl * temperature * (log_p.exp() - q)
    return ce, kl, d_logits.to(hidden.dtype)


@functools.cache
def _compiled_chunk() -> Chunk:
    compiled: Chunk = torch.compile(_chunk)
    return compiled
