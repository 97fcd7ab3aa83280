"""Norm, activations, products of many tokens, attention and the choice of instruction set."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity import native_kernels as kernels
from parity.kernel_checks import U, assert_bits_equal, assert_within, every_isa, normal
from parity.native_kernels import PAGE, usable_sets
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.runtime import native_lib

EXP_ERROR = 1.2e-7  # relative, stated in runtime/native/kernels/simd/exp.inl
SUBNORMAL_SILU = 1.1e-36  # |x exp(x)| where exp(x) would be subnormal and counts as 0
SILU, RELU = 0, 1
LENGTHS = (1, 5, 8, 31, 64, 576, 1001)


@every_isa
def test_rms_norm(isa: str) -> None:
    """The squares are summed in double: one rounding of the scale, two of the products."""
    for n in (*LENGTHS, 16384):
        x, gain = normal(n) * np.float32(3e3), normal(n, seed=1)
        exact = x.astype(np.float64)
        want = exact / np.sqrt(np.mean(exact**2) + 1e-5) * gain
        assert_within(kernels.rms_norm(isa, x, gain, 1e-5), want, 4 * U * np.abs(want))


@every_isa
def test_silu(isa: str) -> None:
    """The error of exp, and four roundings."""
    for n in LENGTHS:
        gate, up = normal(n) * 4, normal(n, seed=1)
        assert_silu_within(isa, gate, up)
    wide = np.linspace(-120, 120, 40_001, dtype=np.float32)
    assert_silu_within(isa, wide, np.ones_like(wide))
    ends = np.array([0.0, -0.0, -1e38, 1e38, -87.3365, -87.3366, 1e-45], np.float32)
    assert_silu_within(isa, ends, np.ones_like(ends))


def assert_silu_within(isa: str, gate: np.ndarray, up: np.ndarray) -> None:
    g = gate.astype(np.float64)
    want = g / (1 + np.exp(-np.maximum(g, -700))) * up
    bound = (EXP_ERROR + 4 * U) * np.abs(want) + SUBNORMAL_SILU * np.abs(up)
    assert_within(kernels.gated(isa, SILU, gate, up), want, bound)


@every_isa
def test_silu_keeps_nan_and_infinity(isa: str) -> None:
    gate = np.array([np.nan, np.inf, -np.nan] * 7, np.float32)
    got = kernels.gated(isa, SILU, gate, np.ones_like(gate))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(gate))
    assert np.isposinf(got[1::3]).all()


@every_isa
def test_relu(isa: str) -> None:
    for n in LENGTHS:
        gate, up = normal(n), normal(n, seed=1)
        for threshold in (0.0, 0.25, -100.0):
            kept = np.where(gate > np.float32(threshold), gate, np.float32(0))
            got = kernels.gated(isa, RELU, gate, up, threshold)
            np.testing.assert_array_equal(got, kept * up)


@every_isa
@pytest.mark.parametrize("transposed", [False, True])
def test_gemm(isa: str, transposed: bool) -> None:
    for n_rows, n_k, n_tokens in (
        (1, 1, 1),
        (5, 33, 3),
        (37, 64, 16),
        (97, 200, 49),
        (12, 576, 70),
    ):
        w, x = normal((n_rows, n_k)), normal((n_tokens, n_k), seed=1)
        stored = np.ascontiguousarray(w.T) if transposed else w
        want = x.astype(np.float64) @ w.T
        bound = (n_k + 1) * U * (np.abs(x) @ np.abs(w.T))
        assert_within(kernels.gemm(isa, stored, x, transposed), want, bound)


@every_isa
def test_gemm_sums_in_the_order_of_k(isa: str) -> None:
    """Rows, tokens and the layout of w change no bit."""
    w, x = normal((61, 130)), normal((67, 130), seed=1)
    whole = kernels.gemm(isa, w, x)
    assert_bits_equal(kernels.gemm(isa, np.ascontiguousarray(w.T), x, transposed=True), whole)
    for begin, end in ((0, 1), (1, 8), (13, 44), (60, 61)):
        assert_bits_equal(kernels.gemm(isa, w[begin:end], x), whole[:, begin:end].copy())
        assert_bits_equal(kernels.gemm(isa, w, x[begin:end]), whole[begin:end])


def attention_reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Float64 output and log-sum-exp, and bounds of their errors, first order in u.

    A score is off by (head_dim + 2) u |q| . |k| scale, so its weight by that relatively, besides the
    error of exp, and the sums over positions and pages by their length.
    """
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    n_q, n_positions = len(q), len(k)
    seen = np.arange(n_positions) <= np.arange(n_positions - n_q, n_positions)[:, None]
    scores = np.where(seen, q @ k.T * scale, -np.inf)
    peak = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=1, keepdims=True)
    weights /= total
    score_error = (q.shape[1] + 2) * U * np.where(seen, np.abs(q) @ np.abs(k.T) * scale, 0)
    distance = U * np.where(seen, peak - scores, 0)
    n_pages = n_positions // PAGE + 1
    relative = score_error + distance + (1 + n_pages) * (EXP_ERROR + U) + n_positions * U
    worst = (weights * relative).sum(axis=1, keepdims=True)
    out_bound = weights * relative @ np.abs(v) + worst * (weights @ np.abs(v))
    lse = (peak + np.log(total)).ravel()
    return weights @ v, lse, out_bound, worst.ravel() + 4 * U * (1 + np.abs(lse))


ROUNDED_ATTENTION = ("avx512_bf16", "amx", "amx_emulated")  # they have it in bfloat16 too
CASES = [  # n_q, n_positions, head_dim
    (1, 1, 64),
    (1, 32, 64),
    (3, 33, 64),
    (4, 64, 128),
    (7, 7, 2),
    (9, 70, 66),
    (64, 200, 80),
    (2, 65, 34),
]


@every_isa
@pytest.mark.parametrize("kv_type", [Type.F32, Type.F16], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("n_q", "n_positions", "head_dim"), CASES)
def test_attention(isa: str, kv_type: Type, n_q: int, n_positions: int, head_dim: int) -> None:
    """The entry point fills unused positions with NaN: a kernel must not let them through."""
    q, k, v = (normal((n, head_dim), seed=i) * 2 for i, n in enumerate((n_q, *2 * [n_positions])))
    scale = np.float32(head_dim**-0.5)
    got, lse = kernels.attention(isa, kv_type, q, k, v, scale)
    if kv_type is Type.F16:
        k, v = k.astype(np.float16), v.astype(np.float16)
    want, want_lse, bound, lse_bound = attention_reference(q, k, v, float(scale))
    assert_within(got, want, bound)
    assert_within(lse, want_lse, lse_bound)


@every_isa
@pytest.mark.parametrize("kv_type", [Type.F32, Type.F16, Type.BF16], ids=lambda kind: kind.name)
def test_attention_of_a_query_is_its_own(isa: str, kv_type: Type) -> None:
    if kv_type is Type.BF16 and isa not in ROUNDED_ATTENTION:
        pytest.skip("factors are never rounded")
    q, k, v = normal((19, 72)), normal((90, 72), seed=1), normal((90, 72), seed=2)
    whole, whole_lse = kernels.attention(isa, kv_type, q, k, v, 0.1)
    for n in (1, 2, 5, 18):
        part, lse = kernels.attention(isa, kv_type, q[-n:], k, v, 0.1)
        assert_bits_equal(part, whole[-n:])
        assert_bits_equal(lse, whole_lse[-n:])
        part, lse = kernels.attention(isa, kv_type, q[:n], k[: 71 + n], v[: 71 + n], 0.1)
        assert_bits_equal(part, whole[:n])  # later positions change nothing
        assert_bits_equal(lse, whole_lse[:n])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])  # 1e6 is beyond float16
@every_isa
def test_a_value_that_is_not_finite_spoils_no_more_than_in_float(isa: str, bad: float) -> None:
    if isa not in ROUNDED_ATTENTION:
        pytest.skip("factors are never rounded")
    q, k, v = normal((19, 72)), normal((90, 72), seed=1), normal((90, 72), seed=2)
    v[-1] = bad  # seen by the last query alone; float kernels compute a few queries together
    rounded, in_float = (
        kernels.attention(isa, kv_type, q, k, v, 0.1)[0] for kv_type in (Type.BF16, Type.F16)
    )
    spoilt = ~np.isfinite(in_float).all(axis=1)
    assert spoilt[-1]
    assert not spoilt[:-4].any()
    assert_bits_equal(rounded, in_float)


@every_isa
@pytest.mark.parametrize("shift", [-5e4, 5e4])
def test_attention_of_large_scores(isa: str, shift: float) -> None:
    """Scores far from 0 neither overflow nor vanish: only differences count."""
    q, k, v = np.ones((1, 1 * 2), np.float32), np.zeros((70, 2), np.float32), normal((70, 2))
    k[:, 0] = np.float32(shift) + np.arange(70) % 7
    got, lse = kernels.attention(isa, Type.F32, q, k, v, 1.0)
    weights = np.exp(k[:, 0].astype(np.float64) - k[:, 0].max())
    np.testing.assert_allclose(got[0], weights @ v / weights.sum(), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(lse[0], k[:, 0].max() + np.log(weights.sum()), rtol=2 * U)


@every_isa
def test_cache_values_round_to_nearest_even(isa: str) -> None:
    """One position has weight 1: the output is the cached half itself."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].astype(np.float32)
    between = (halves[:-1] + halves[1:]) / 2  # ties, where both neighbours have a common sign
    ends = np.array([65519.9, 65520.0, 1e9, -1e9, 2.9e-8, 2.99e-8, 1e-45, -0.0], np.float32)
    values = np.concatenate([halves, between, np.nextafter(between, np.inf), ends])
    values = values[np.isfinite(values)]
    values = np.append(values, values[: len(values) % 2])[None]
    key = np.zeros_like(values)
    got, _ = kernels.attention(isa, Type.F16, key, key, values, 1.0)
    with np.errstate(over="ignore"):
        want = values.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(got, want)


# ---- choice of instruction set, and refused arguments --------------------------------------------


def test_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PI_ISA", raising=False)
    names = usable_sets()
    assert names[0] == "scalar"
    assert native_lib.select_isa() == names[-1]
    for name in names:
        monkeypatch.setenv("PI_ISA", name)
        assert native_lib.select_isa() == name
        assert native_lib.select_isa("scalar") == "scalar"
    monkeypatch.setenv("PI_ISA", "nonsense")
    with pytest.raises(UsageError, match=r"PI_ISA.*'nonsense'") as failure:
        native_lib.select_isa()
    assert all(name in failure.value.hint for name in names)
    for name, usable in native_lib.instruction_sets():
        if not usable:
            with pytest.raises(UsageError, match="does not run on this processor"):
                native_lib.select_isa(name)


def test_refused_arguments() -> None:
    row, x = np.zeros(34 * 4, np.uint8), np.zeros(96, np.float32)
    with pytest.raises(UsageError, match="begin"):
        kernels.dequantize("scalar", Type.Q8_0, row, 5, 3)
    with pytest.raises(UsageError, match="n_cols must be a multiple of 32"):
        kernels.dot_rows("scalar", Type.Q8_0, row[None], x[:33])
    with pytest.raises(UsageError, match="activation_type"):
        kernels.dot_rows("scalar", Type.F32, x[None], x, activation=Type.Q8_0)
    with pytest.raises(UsageError, match="outside the row"):
        kernels.axpy_rows("scalar", Type.F32, x[None], x[:1], 96, x[:64], begin=64)
    with pytest.raises(UsageError, match="as many positions"):
        kernels.attention("scalar", Type.F32, x[None], x[:0], x[:0], 1.0)
    with pytest.raises(PiError, match="IQ1_S is not supported"):
        kernels.dequantize("scalar", Type.IQ1_S, row, 0, 32)
