"""Products of many tokens' int8 activations, where an instruction set has them, against numpy float64."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity import native_kernels as kernels
from parity.kernel_checks import U, assert_bits_equal, assert_within, normal, quantise_activations
from parity.unpacked_rows import QUANTS, minima, random_rows
from powerinfer_toolkit.errors import UsageError

SETS = [
    name
    for name in kernels.usable_sets()
    if name in ("avx512", "avx512_bf16", "neon_dotprod", "neon_i8mm")
]
every_set = pytest.mark.parametrize("isa", SETS)
KINDS = tuple(QUANTS)
every_type = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def lows(rows: np.ndarray, kind: Type) -> np.ndarray:
    """The part of a value that does not depend on activations' products: exact zeros are moved to 128."""
    if kind in (Type.Q8_0, Type.IQ4_NL, Type.MXFP4):
        return 128 * np.abs(kernels.dequantise(rows, kind)).max()
    return minima(rows, kind)


@every_set
@every_type
def test_every_token_equals_the_float64_product(isa, kind):
    """Shapes around the tile of 32 rows x 6 tokens x 512 columns. A sub-block's product rounds some four times,
    with terms that may be larger than the value: those of an unsigned quant and of its zero.
    """
    for n_rows, n_cols, n_tokens in ((1, 256, 5), (32, 512, 6), (33, 768, 13), (75, 1792, 31)):
        rows, x = random_rows(kind, n_rows, n_cols, seed=n_rows), normal((n_tokens, n_cols))
        w = kernels.dequantise(rows, kind).astype(np.float64)
        low = lows(rows, kind)
        xq, xd = quantise_activations(x)
        rounded = (xq * xd[:, None].astype(np.float64)).reshape(x.shape)
        magnitude = np.abs(rounded) @ (np.abs(w - low) + np.abs(low)).T
        got = kernels.multiply_rows(isa, kind, rows, x)
        assert_within(got, rounded @ w.T, (n_cols // 16 + 4) * U * magnitude)


@every_set
@every_type
def test_a_result_does_not_depend_on_its_neighbours(isa, kind):
    rows, x = random_rows(kind, 70, 768), normal((20, 768))
    whole = kernels.multiply_rows(isa, kind, rows, x)
    for first, n, token, n_tokens in ((0, 1, 0, 20), (31, 2, 3, 5), (40, 30, 19, 1)):
        part = kernels.multiply_rows(
            isa, kind, rows[first : first + n], x[token : token + n_tokens]
        )
        assert_bits_equal(
            part, np.ascontiguousarray(whole[token : token + n_tokens, first : first + n])
        )


@every_set
@every_type
def test_extremes(isa, kind):
    """The largest quants times the largest activations of one sign overflow nowhere; a NaN stays in its token."""
    rows = random_rows(kind, 33, 512)
    blocks = rows.reshape(33, -1, gguf.GGML_QUANT_SIZES[kind][1])
    blocks[..., QUANTS[kind] or slice(-16, None)] = 0xFF
    blocks[::2, :, QUANTS[kind] or slice(-16, None)] = 0x80
    x = np.full((7, 512), -1, np.float32)
    x[3, 40] = np.nan
    got = kernels.multiply_rows(isa, kind, rows, x)
    w = kernels.dequantise(rows, kind).astype(np.float64)
    low = np.abs(lows(rows, kind))
    magnitude = (np.abs(w) + 2 * low).sum(axis=1)
    for token in (0, 6):
        assert_within(got[token], -w.sum(axis=1), (512 // 16 + 5) * U * magnitude)
    assert np.isnan(got[3]).all()


def test_other_sets_refuse():
    with pytest.raises(UsageError, match="scalar has no product of many tokens for Q8_0"):
        kernels.multiply_rows("scalar", Type.Q8_0, random_rows(Type.Q8_0, 1, 32), normal((5, 32)))
