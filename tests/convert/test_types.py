"""Every tensor type: bits equal ggml's and gguf-py's, errors within the format's bound (about 10 s)."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from powerinfer_toolkit import gguf_types
from powerinfer_toolkit.convert.elements import PACKED, to_float32
from powerinfer_toolkit.convert.encoding import READ_ONLY, encode
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.gguf_types import WEIGHED, is_packed

WRITTEN = [t for t in PACKED.values() if t not in READ_ONLY]
BY_GGUF_PY = [TensorType.Q8_0, *WEIGHED[:4]]
FLOATS = [TensorType.F32, TensorType.F16, TensorType.BF16]


def named(types):
    return pytest.mark.parametrize("tensor_type", types, ids=lambda t: t.name)


@pytest.fixture(scope="module")
def ggml():
    pytest.importorskip("xllamacpp")
    from parity.ggml import Ggml

    return Ggml()


def awkward_rows(seed: int, ties: bool = True) -> np.ndarray:
    """Float32 [16, 512]: normal rows of many scales, zeros, constants, one peak, tiny and large numbers.

    With `ties` a row of quarters too: there ggml and libgguf, whose compilers fuse multiplication and addition,
    round otherwise than gguf-py.
    """
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((16, 512)).astype(np.float32)
    rows *= (10.0 ** rng.uniform(-3, 1, (16, 1))).astype(np.float32)
    rows[0] = 0
    rows[1] = -0.75
    rows[2] = 0
    rows[2, 100] = 3
    rows[3] = np.round(rows[3] * 4) / 4 if ties else rows[3]
    rows[4] = np.abs(rows[4])
    rows[5] = -np.abs(rows[5])
    rows[6] *= 1e-6
    rows[7, ::32] *= 1e3
    return rows


@named(WRITTEN)
def test_bits_are_ggmls(ggml, tensor_type):
    for seed in range(4):
        rows = awkward_rows(seed, ties=tensor_type not in BY_GGUF_PY)
        want = ggml.quantise(rows, Type(tensor_type))
        assert encode(rows, tensor_type, "x").data.tobytes() == want.tobytes()


@named(WEIGHED)
def test_bits_with_importance_are_ggmls(ggml, tensor_type):
    differing = 0
    for seed in range(4):
        rows = awkward_rows(seed)
        weights = np.random.default_rng(seed).exponential(size=512).astype(np.float32)
        got = encode(rows, tensor_type, "x", importance=weights).data.tobytes()
        assert got == ggml.quantise(rows, Type(tensor_type), weights).tobytes()
        differing += got != encode(rows, tensor_type, "x").data.tobytes()
    assert differing == 4  # the weights did matter


@named(BY_GGUF_PY)
def test_libgguf_equals_gguf_py(tensor_type):
    libgguf = pytest.importorskip("libgguf")
    for seed in range(4):
        rows = awkward_rows(seed, ties=False)
        want = gguf.quants.quantize(rows, Type(tensor_type))
        assert libgguf.quantize_rows(rows, int(tensor_type)).tobytes() == want.tobytes()


@named([*PACKED.values()])
def test_values_of_any_bits_are_ggmls(ggml, tensor_type):
    """Random bytes, so every scale there is: infinite and NaN ones too."""
    n_bytes = gguf.GGML_QUANT_SIZES[Type(tensor_type)][1]
    data = np.random.default_rng(1).integers(0, 256, (2000, n_bytes), dtype=np.uint8)
    got, want = to_float32(data, tensor_type.name), ggml.dequantise(data, Type(tensor_type))
    np.testing.assert_array_equal(got, want)  # NaN where NaN is
    finite = np.isfinite(want)
    assert finite.mean() > 0.5
    assert (got[finite].view(np.uint32) == want[finite].view(np.uint32)).all()


F16_STEP = 2.0**-11  # relative rounding of a scale


@pytest.mark.parametrize(
    ("tensor_type", "half_steps", "steps"),
    [
        # x in [-max, max], scale max / 127, rounded to nearest: half a step
        (TensorType.Q8_0, 0.5, 1 / 127),
        # scale max / 8 with the extreme at -8: nearest, but up to 8 on the other side cannot be reached
        (TensorType.Q4_0, 1.0, 1 / 8),
        (TensorType.Q5_0, 1.0, 1 / 16),
        # scale (max - min) / 15 or 31 over a range of at most 2 max
        (TensorType.Q4_1, 0.5, 2 / 15),
        (TensorType.Q5_1, 0.5, 2 / 31),
    ],
    ids=lambda value: value.name if isinstance(value, TensorType) else "",
)
@given(seed=st.integers(0, 1 << 30), scale=st.floats(1e-2, 1e3))
@settings(max_examples=40)
def test_error_of_simple_blocks(tensor_type, half_steps, steps, seed, scale):
    """|error| <= half a step (a whole one where the grid is lopsided), and what the float16 scale loses."""
    drawn = np.random.default_rng(seed).standard_normal((4, 64)) * scale
    rows = drawn.astype(np.float32)
    decoded = to_float32(encode(rows, tensor_type, "x").data, tensor_type.name)
    peak = np.abs(rows.reshape(4, -1, 32)).max(axis=-1, keepdims=True)
    # the scale's rounding moves the farthest point by F16_STEP of it, an offset's rounding by as much again
    bound = peak * (half_steps * steps + 2 * F16_STEP)
    assert (np.abs(decoded - rows).reshape(4, -1, 32) <= bound).all()


# Of normal numbers: elements a group, steps over its range, steps over the super-block's range of scales.
SUPER_BLOCKS = {
    TensorType.Q2_K: (16, 3, 15),
    TensorType.Q3_K: (16, 7, 31),
    TensorType.Q4_K: (32, 15, 63),
    TensorType.Q5_K: (32, 31, 63),
    TensorType.Q6_K: (16, 63, 127),
    TensorType.IQ4_NL: (32, 15, None),
}


@named([*SUPER_BLOCKS])
def test_error_of_super_blocks(tensor_type):
    """Root mean square on normal numbers, below that of the plainest way to fill the same format.

    That way: split each group's range evenly, uniform error step / sqrt(12), and round the group's scale and
    offset to the super-block's steps, which shifts every point of the group by up to half such a step of the
    largest scale, times the points, and as much of the largest offset.
    """
    group, n_steps, n_scales = SUPER_BLOCKS[tensor_type]
    rows = np.random.default_rng(2).standard_normal((64, 2048)).astype(np.float32)
    decoded = to_float32(encode(rows, tensor_type, "x").data, tensor_type.name)
    error = np.sqrt(np.mean((decoded - rows) ** 2))
    groups = rows.reshape(-1, 256 // group, group)
    span = groups.max(axis=-1) - groups.min(axis=-1)
    step = span / n_steps
    bound = np.mean(step**2) / 12
    if n_scales is not None:
        shift = span.max(axis=1) / n_scales / 2
        bound += (
            np.mean(shift**2) / 3 * 2
        )  # uniform within +- shift: of the scale and of the offset
    assert error <= np.sqrt(bound)
    assert error >= 0.2 * np.sqrt(np.mean(step**2) / 12)  # and it is no copy


@named(WRITTEN)
def test_bits_do_not_depend_on_threads(tensor_type, monkeypatch):
    rows = awkward_rows(5)
    results = set()
    for n_threads in (1, 2, 7, 64):
        monkeypatch.setattr(gguf_types.os, "cpu_count", lambda n=n_threads: n)
        results.add(encode(rows, tensor_type, "x").data.tobytes())
    assert len(results) == 1


@named([*WRITTEN, *FLOATS])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite(tensor_type, value):
    rows = awkward_rows(6)
    rows[9, 77] = value
    with pytest.raises(PiError, match="x holds NaN or infinite weights"):
        encode(rows, tensor_type, "x")
    encoded = encode(rows, tensor_type, "x", allow_nonfinite=True)
    assert encoded.n_nonfinite == 1
    replaced = rows.copy()
    if is_packed(tensor_type):
        replaced[9, 77] = 0
        assert encoded.data.tobytes() == encode(replaced, tensor_type, "x").data.tobytes()
    else:
        decoded = gguf.quants.dequantize(encoded.data, Type(tensor_type))
        np.testing.assert_array_equal(decoded[9, 77], np.float32(value))
        assert np.isfinite(decoded).sum() == decoded.size - 1


@named([t for t in [*WRITTEN, *FLOATS] if t is not TensorType.F32])
def test_range(tensor_type):
    """Up to the range everything comes back finite; beyond, it is refused, never infinite."""
    rows = awkward_rows(7)
    refused = 0
    for exponent in range(4, 39):
        rows[8, 3] = 10.0**exponent
        try:
            decoded = gguf.quants.dequantize(encode(rows, tensor_type, "x").data, Type(tensor_type))
        except PiError:
            refused += 1
        else:
            assert not refused
            assert np.isfinite(decoded).all()
    rows[8, 3] = np.finfo(np.float32).max
    with pytest.raises(PiError, match="beyond the range"):
        encode(rows, tensor_type, "x")
    assert refused or tensor_type is TensorType.BF16
