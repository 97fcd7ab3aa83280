"""What a miss costs: gradients against autograd on the whole model, the loss's minimum, the cheap costs (about 3 s)."""

import numpy as np
import pytest
import torch

from parity.sparse_checkpoint import blocks_of
from powerinfer_toolkit.train_predictor.capture import Captured, CostModel, Costs, capture
from powerinfer_toolkit.train_predictor.training import cost_loss


def tokens_of(sparse_checkpoint, n=3):
    blocks = blocks_of(sparse_checkpoint)
    return torch.from_numpy(blocks[:n].astype(np.int64))


def plain_gradients(model, tokens, labels, layer):
    """d(sum of -log p(label)) / d hidden of one layer, by adding a zero that has a gradient."""
    zero = torch.zeros(*tokens.shape, model.n_ff, requires_grad=True)
    seen = []

    def tap(at, _, hidden):
        if at != layer:
            return None
        seen.append(hidden.detach())
        return hidden + zero

    with model.tapped(tap):
        logits = model.model(tokens).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    (gradient,) = torch.autograd.grad(loss, zero)
    return seen[0], gradient


@pytest.mark.parametrize("layers", [[0, 1, 2], [1], [1, 2]])
def test_gradients_are_those_of_labels_drawn_from_the_model(
    sparse_model, sparse_checkpoint, layers
):
    tokens = tokens_of(sparse_checkpoint)
    captured = capture(sparse_model, tokens, layers, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        p = sparse_model.model(tokens).logits.flatten(0, 1).softmax(-1)
        labels = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(5))
    for place, layer in enumerate(layers):
        hidden, gradient = plain_gradients(sparse_model, tokens, labels.view_as(tokens), layer)
        expected = gradient[:, 1:].flatten(0, 1)
        scale = float(expected.abs().max())
        assert scale > 1e-3
        torch.testing.assert_close(captured.gradient[place], expected, rtol=1e-3, atol=1e-5 * scale)
        torch.testing.assert_close(captured.hidden[place], hidden[:, 1:].flatten(0, 1))


def test_half_the_squared_product_is_the_expected_damage(sparse_model, sparse_checkpoint):
    """Over labels drawn from the model, 1/2 E[(h g)^2] is the second-order KL of dropping a neuron."""
    tokens = tokens_of(sparse_checkpoint, 1)
    layer = 2
    generator = torch.Generator().manual_seed(0)
    drawn = [capture(sparse_model, tokens, [layer], generator=generator) for _ in range(400)]
    hidden = drawn[0].hidden[0]
    damage = torch.stack([(c.hidden[0] * c.gradient[0]).square() for c in drawn]).mean(0) / 2
    with torch.no_grad():
        reference = sparse_model.model(tokens).logits[0].log_softmax(-1)
    strongest = damage.flatten().argsort(descending=True)[:40:4]
    ratios = []
    for at in strongest.tolist():
        row, neuron = divmod(at, hidden.shape[1])
        kept = 0.9  # a tenth of the activation is dropped, so that second order is enough

        def tap(at_layer, _, h, row=row, neuron=neuron, kept=kept):
            if at_layer != layer:
                return None
            h = h.clone()
            h[0, row + 1, neuron] *= kept
            return h

        with torch.no_grad(), sparse_model.tapped(tap):
            changed = sparse_model.model(tokens).logits[0].log_softmax(-1)
        kl = float((reference.exp() * (reference - changed)).sum())
        ratios.append(kl / (float(damage[row, neuron]) * (1 - kept) ** 2))
    # 400 draws of a square of roughly normal numbers: a standard error of sqrt(2 / 400) = 7% each
    assert np.median(ratios) == pytest.approx(1.0, abs=0.15)


def random_capture(model, n_tokens=50):
    generator = torch.Generator().manual_seed(1)
    shape = (model.n_layers, n_tokens, model.n_ff)
    hidden = torch.randn(shape, generator=generator).relu()
    gradient = 0.1 * torch.randn(shape, generator=generator)
    return Captured(torch.empty(0), hidden, gradient)


def test_costs_in_prices(sparse_model, small):
    captured = random_capture(sparse_model)
    settings = small(predictor_loss="gradient", byte_price=0.016, cost_clip=50.0)
    costs = CostModel(settings, sparse_model).of(captured, range(3))
    nats = 0.5 * (captured.hidden * captured.gradient) ** 2
    price = 0.016 / sparse_model.n_ff
    torch.testing.assert_close(costs.miss, (nats / price).clamp(max=50.0))
    assert float(costs.miss.max()) == 50.0
    fires = captured.hidden != 0
    assert set(costs.read[fires].tolist()) == {1.0}
    assert costs.read[~fires].unique().tolist() == pytest.approx([1 / 3])
    assert float(costs.miss[~fires].abs().max()) == 0.0


def test_cheap_costs(sparse_model, small):
    captured = random_capture(sparse_model)
    plain = Captured(captured.inputs, captured.hidden, None)
    uniform = CostModel(small(predictor_loss="uniform"), sparse_model).of(plain, range(3))
    fires = captured.hidden != 0
    assert uniform.miss[fires].unique().tolist() == pytest.approx([20 / 3])
    found = CostModel(small(predictor_loss="contribution"), sparse_model).of(plain, range(3))
    for layer in range(3):
        down = sparse_model.blocks[layer].down.weight.norm(dim=0)
        size = captured.hidden[layer] * down
        share = size / size[fires[layer]].mean()
        expected = (share * 20 / 3).clamp(max=200 / 3)
        torch.testing.assert_close(found.miss[layer], expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_least_where_missing_costs_what_reading_costs():
    """E[loss](s) = E[miss] log(1 + e^-s) + E[read] log(1 + e^s), by a scan of s."""
    generator = torch.Generator().manual_seed(0)
    miss = torch.rand(1, 500, 3, generator=generator) * torch.tensor([0.1, 1.0, 20.0])
    read = torch.full_like(miss, 1 / 3) + 2 / 3 * (miss > 0.05)
    for neuron in range(3):
        scan = torch.linspace(-6, 6, 2401)
        values = [
            float(
                cost_loss(
                    torch.full((1, 500, 1), float(s)),
                    Costs(miss[..., [neuron]], read[..., [neuron]]),
                )
            )
            for s in scan
        ]
        best = float(scan[int(np.argmin(values))])
        expected = float((miss[..., neuron].mean() / read[..., neuron].mean()).log())
        assert best == pytest.approx(expected, abs=0.02)  # two steps of the scan, in float32
        by_hand = miss[..., neuron].mean() * np.log1p(np.exp(-2.0)) + read[
            ..., neuron
        ].mean() * np.log1p(np.exp(2.0))
        at_two = values[int(np.argmin(np.abs(scan.numpy() - 2.0)))]
        assert at_two == pytest.approx(float(by_hand), rel=1e-4)
