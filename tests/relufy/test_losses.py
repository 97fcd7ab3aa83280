"""The chunked loss against the plain formulas on whole logits, in float64."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from powerinfer_toolkit.convert.relufy.losses import LossWeights, language_loss  # noqa: E402

N_TOKENS, N_EMBD, N_VOCAB = 11, 6, 17
# float64 sums of a few hundred terms of order 1 in another order: 1e-16 * 1e3, with a margin of 100.
TOLERANCE = {"rtol": 0, "atol": 1e-11}


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    hidden, head, t_hidden, t_head = (
        torch.randn(n, N_EMBD, generator=generator, dtype=dtype)
        for n in (N_TOKENS, N_VOCAB, N_TOKENS, N_VOCAB)
    )
    labels = torch.randint(N_VOCAB, (N_TOKENS,), generator=generator)
    return hidden.requires_grad_(), head.requires_grad_(), labels, (t_hidden, t_head)


def plain(hidden, head, labels, teacher, weights):
    """The same loss from torch's own functions."""
    logits, temperature = hidden @ head.T, weights.temperature
    ce = F.cross_entropy(logits, labels)
    student = F.log_softmax(logits / temperature, dim=-1)
    target = F.log_softmax(teacher[0] @ teacher[1].T / temperature, dim=-1)
    kl = F.kl_div(student, target, log_target=True, reduction="batchmean")
    return weights.ce * ce + weights.kl * temperature**2 * kl, ce, kl


@pytest.mark.parametrize("chunk", [1, 4, N_TOKENS, 100])
@pytest.mark.parametrize(
    "weights", [LossWeights(0.5, 0.5), LossWeights(1.0, 0.0), LossWeights(0.2, 0.7, 2.5)]
)
def test_values_and_gradients(chunk, weights):
    hidden, head, labels, teacher = tensors()
    total, ce, kl = plain(hidden, head, labels, teacher, weights)
    expected = torch.autograd.grad(3 * total, (hidden, head))
    found = language_loss(hidden, head, labels, weights, chunk, teacher)
    torch.testing.assert_close(found.total, total, **TOLERANCE)
    torch.testing.assert_close(found.ce, ce.detach(), **TOLERANCE)
    torch.testing.assert_close(found.kl, kl.detach() * (weights.kl > 0), **TOLERANCE)
    gradients = torch.autograd.grad(3 * found.total, (hidden, head))
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, **TOLERANCE)


def test_a_frozen_head_gets_no_gradient():
    hidden, head, labels, teacher = tensors()
    head.requires_grad_(False)
    loss = language_loss(hidden, head, labels, LossWeights(1.0, 1.0), 3, teacher).total
    loss.backward()
    assert head.grad is None
    assert hidden.grad.abs().sum() > 0


def test_bfloat16_autocast_is_near():
    """bfloat16 has 8 bits: logits of size 5 are off by 0.02, so means of losses by no more than that."""
    hidden, head, labels, teacher = tensors(torch.float32)
    weights = LossWeights(0.5, 0.5)
    exact = plain(hidden, head, labels, teacher, weights)[0]
    with torch.autocast("cpu", torch.bfloat16):
        bf16_teacher = tuple(t.bfloat16() for t in teacher)
        found = language_loss(hidden, head, labels, weights, 4, bf16_teacher)
    assert abs(found.total.item() - exact.item()) < 0.02
    assert found.total.dtype == torch.float32
    found.total.backward()
    assert hidden.grad.dtype == head.grad.dtype == torch.float32
