"""The network: whitening, the constant unit, singular vectors, and what is exported (about 2 s)."""

import numpy as np
import pytest
import torch

from powerinfer_toolkit.train_predictor.network import (
    Predictor,
    PredictorStack,
    Whitening,
    unit_rms,
)

N_LAYERS, N_EMBD, N_FF, RANK = 2, 24, 50, 9


def residuals(n_tokens=4000, seed=0):
    """Correlated inputs of very different sizes [n_layers, n_tokens, n_embd], with a constant part."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(N_LAYERS, N_EMBD, N_EMBD, generator=generator) / N_EMBD**0.5
    mixing = torch.eye(N_EMBD) + 0.5 * mixing
    noise = torch.randn(N_LAYERS, n_tokens, N_EMBD, generator=generator)
    sizes = torch.rand(N_LAYERS, n_tokens, 1, generator=generator) * 30 + 0.1
    return (noise @ mixing + 2 * mixing[:, :1]) * sizes


def whitening_of(inputs):
    inputs = inputs.double()
    second = inputs.mT @ inputs / inputs.shape[1]
    return Whitening.of(second, inputs.mean(1))


@pytest.fixture
def stack():
    torch.manual_seed(0)
    inputs = unit_rms(residuals())
    made = PredictorStack(whitening_of(inputs), RANK, N_FF)
    made.set_bias(torch.randn(N_LAYERS, N_FF))
    return made


def check_decisions(predictor, raw, stack, layer, margin):
    """Decisions on the raw residual are margin >= 0, but for margins within the rounding of float16 weights.

    Each of the two weights of a product is rounded by at most 2^-11 of itself.
    """
    sizes = unit_rms(raw).abs() @ stack.fc1()[layer].abs().mT @ stack.second[layer].abs().mT
    near = margin.abs() <= 2.1 * 2.0**-11 * sizes
    same = predictor.predicts(raw) == (margin >= 0)
    assert bool((same | near).all())
    assert near.float().mean() < 0.1


def test_whitened_inputs_are_white():
    inputs = unit_rms(residuals())
    white = inputs.double() @ whitening_of(inputs).root_inverse.double().mT
    moment = white.mT @ white / white.shape[1]
    # the ridge of 1e-6 mean eigenvalues over eigenvalues of 1e-3 means and more: 1e-3, and float32
    np.testing.assert_allclose(moment, np.tile(np.eye(N_EMBD), (N_LAYERS, 1, 1)), atol=2e-3)


def test_the_constant_unit_is_the_best_linear_guess_of_1():
    inputs = unit_rms(residuals())
    whitening = whitening_of(inputs)
    unit = (inputs @ whitening.root_inverse.mT @ whitening.constant[..., None])[..., 0]
    best = [np.linalg.lstsq(x.numpy(), np.ones(len(x)), rcond=None)[0] for x in inputs]
    expected = np.stack([x.numpy() @ w for x, w in zip(inputs, best, strict=True)])
    np.testing.assert_allclose(unit, expected, atol=2e-3)
    error = np.sqrt(((expected - 1) ** 2).mean(1))
    np.testing.assert_allclose(whitening.constant_error, error, atol=2e-3)


def test_fc1_on_the_raw_residual_equals_the_whitened_form(stack):
    raw = residuals(seed=1)
    white = unit_rms(raw) @ stack.root_inverse.mT
    whitened = torch.relu(white @ stack.first.mT) @ stack.second.mT
    logits = stack(unit_rms(raw))
    torch.testing.assert_close(logits, whitened, rtol=1e-4, atol=1e-3)
    for layer in range(N_LAYERS):
        predictor = Predictor.fold(stack.fc1()[layer], stack.second[layer], 0.0)
        check_decisions(predictor, raw[layer], stack, layer, logits[layer])


def test_scaling_the_residual_changes_no_decision(stack):
    raw = residuals(100, seed=2)[0]
    predictor = Predictor.fold(stack.fc1()[0], stack.second[0], 0.3)
    for scale in (2.0**-8, 2.0**9):  # exact in float32
        assert torch.equal(predictor.predicts(raw), predictor.predicts(raw * scale))


def test_a_threshold_is_folded_through_the_constant_unit(stack):
    """Where the constant unit is 1, the folded decision is logit >= threshold, per neuron and per layer."""
    raw = residuals(500, seed=3)
    unit = torch.relu(unit_rms(raw) @ stack.fc1()[:, :1].mT)[..., 0]
    logits = stack(unit_rms(raw))
    for layer, threshold in enumerate((-0.7, 0.5)):
        predictor = Predictor.fold(stack.fc1()[layer], stack.second[layer], threshold)
        margin = logits[layer] - threshold * unit[layer][:, None]
        check_decisions(predictor, raw[layer], stack, layer, margin)


def test_singular_vectors_reproduce_a_low_rank_gate():
    torch.manual_seed(1)
    inputs = unit_rms(residuals())
    whitening = whitening_of(inputs)
    gate = torch.randn(N_LAYERS, N_FF, 4) @ torch.randn(N_LAYERS, 4, N_EMBD)
    stack = PredictorStack(whitening, 9, N_FF)  # the constant unit and four pairs
    stack.set_singular_vectors(gate, whitening)
    expected = inputs @ gate.mT
    torch.testing.assert_close(
        stack(inputs), expected, rtol=1e-3, atol=1e-3 * float(expected.std())
    )


def test_fewer_pairs_give_the_best_form_on_these_inputs():
    torch.manual_seed(1)
    inputs = unit_rms(residuals())
    whitening = whitening_of(inputs)
    gate = torch.randn(N_LAYERS, N_FF, N_EMBD)
    stack = PredictorStack(whitening, 7, N_FF)
    stack.set_singular_vectors(gate, whitening)
    expected = inputs @ gate.mT
    error = (stack(inputs) - expected).square().sum((1, 2)).detach().numpy()
    values = [np.linalg.svd(e.numpy(), compute_uv=False) for e in expected]  # Eckart and Young
    best = [float((v[3:] ** 2).sum()) for v in values]
    np.testing.assert_allclose(error, best, rtol=2e-3)


def test_the_constant_unit_is_not_trained(stack):
    before = stack.first[:, 0].clone()
    optimizer = torch.optim.Adam(stack.parameters(), lr=0.1)
    stack(unit_rms(residuals(64))).square().sum().backward()
    optimizer.step()
    assert torch.equal(stack.first[:, 0], before)
    assert not torch.equal(stack.second[:, :, 0], torch.zeros(N_LAYERS, N_FF))
