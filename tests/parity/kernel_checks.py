"""What the kernel tests share: inputs, bounds, comparison by bits.

U is the unit roundoff of float32. A float32 sum of n products, in any order, is off by at most about
n U times the sum of the products' magnitudes (Higham, Accuracy and Stability, section 3.1).
"""

from __future__ import annotations

import numpy as np
import pytest

from parity.native_kernels import BLOCK, usable_sets

U = 2.0**-24

every_isa = pytest.mark.parametrize("isa", usable_sets())


def normal(shape: int | tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_bits_equal(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


def assert_within(got: np.ndarray, want: np.ndarray, bound: np.ndarray) -> None:
    assert np.isfinite(got).all()
    worst = np.max(np.abs(got - want) / np.maximum(bound, np.finfo(np.float32).tiny))
    assert worst <= 1, f"error is {worst:.3g} times the bound"


def quantise_activations(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x as int8 blocks [n_blocks, 32] and their scales, in float32 steps as kernels.h says."""
    blocks = x.reshape(-1, BLOCK)
    d = np.abs(blocks).max(axis=1) / np.float32(127)
    inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d > 0)
    return np.rint(blocks * inverse[:, None]).astype(np.int64), d
