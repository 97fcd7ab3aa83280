"""Row order of q and k, and llama3's frequency factors, against transformers' formulas (about 4 s)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerinfer_toolkit.convert.config import Rope, RopeKind
from powerinfer_toolkit.convert.rope import interleaved_rows, llama3_factors


def rotate_halves(x, angle):
    """transformers' rotate_half: element i with i + d/2. x [n, heads, d], angle [n, d/2]."""
    cos, sin = (np.concatenate([f(angle)] * 2, axis=-1)[:, None] for f in (np.cos, np.sin))
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin


def rotate_pairs(x, angle):
    """GGUF's llama: elements 2 i and 2 i + 1 as a complex number times exp(i angle)."""
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    turned = pairs * np.exp(1j * angle)[:, None]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(4, 2, 16), (3, 1, 10), (1, 1, 2)])
def test_scores_do_not_change(n_heads, n_kv_heads, head_dim):
    rng = np.random.default_rng(0)
    n_embd, n = 24, 7
    x = rng.normal(size=(n, n_embd))
    wq = rng.normal(size=(n_heads * head_dim, n_embd))
    wk = rng.normal(size=(n_kv_heads * head_dim, n_embd))
    bq = rng.normal(size=n_heads * head_dim)
    angle = np.arange(n)[:, None] * 0.7 ** np.arange(head_dim // 2)

    def scores(rotate, wq, wk, bq):
        q = rotate((x @ wq.T + bq).reshape(n, n_heads, head_dim), angle)
        k = rotate((x @ wk.T).reshape(n, n_kv_heads, head_dim), angle)
        return np.einsum("nhd,mhd->hnm", q, np.repeat(k, n_heads // n_kv_heads, axis=1))

    rows_q = interleaved_rows(n_heads, head_dim)
    rows_k = interleaved_rows(n_kv_heads, head_dim)
    want = scores(rotate_halves, wq, wk, bq)
    got = scores(rotate_pairs, wq[rows_q], wk[rows_k], bq[rows_q])
    np.testing.assert_allclose(got, want, atol=1e-12 * np.abs(want).max())  # float64 rounding
    if head_dim > 2:
        assert not np.allclose(scores(rotate_pairs, wq, wk, bq), want)


@given(
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    half_dim=st.integers(1, 64),
    factor=st.floats(1.0, 64.0),
    low=st.floats(0.5, 4.0),
    width=st.floats(0.1, 8.0),
    original=st.sampled_from([32, 512, 8192]),
)
def test_llama3_factors_equal_transformers(theta, half_dim, factor, low, width, original):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": low + width,
        "original_max_position_embeddings": original,
    }
    config = transformers.LlamaConfig(
        head_dim=2 * half_dim, max_position_embeddings=1 << 20, rope_parameters=scaling
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    plain = theta ** -(np.arange(half_dim) / half_dim)
    rope = Rope(theta, RopeKind.LLAMA3, factor, low, low + width, original)
    got = llama3_factors(rope, 2 * half_dim)
    # transformers works in float32, here it is float64: about 5 roundings of 6e-8 each. In the share kept,
    # (turns - low) / width, an error of the turns grows by at most high / width, and the frequency, at least
    # 1 / factor of the plain one, turns it into a relative error by at most `factor`.
    rtol = 3e-7 * (1 + factor * (low + width) / width)
    np.testing.assert_allclose(plain / got, scaled.numpy(), rtol=rtol)


def test_factors_come_as_a_tensor(checkpoint, converted):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    old = converted(checkpoint({"rope_scaling": scaling, "rope_theta": 5e5}))
    factors = old.tensor("rope_freqs.weight")
    assert factors.shape == (8,)
    assert factors[0] == 1.0
    assert factors[-1] == 8.0
    assert np.all(np.diff(factors) >= 0)
    assert old.key("llama.rope.freq_base") == 5e5
    new = checkpoint({"rope_parameters": scaling | {"rope_theta": 5e5}}, name="new")
    np.testing.assert_array_equal(converted(new, force=True).tensor("rope_freqs.weight"), factors)
