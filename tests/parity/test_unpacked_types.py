"""The types without vector code of their own: Q5_0, Q5_1, K-quants, IQ4_NL, MXFP4, NVFP4."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity import native_kernels as kernels
from parity.closeness import relative_l2
from parity.kernel_checks import U, assert_bits_equal, assert_within, every_isa, normal
from parity.reference import Reference
from parity.steps import decode, random_tokens
from parity.synthetic import Shape, random_weights, without_predictors, write_gguf
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.runtime import Model

# Where a block has its float16 scales, so that random bytes can be given finite ones.
HALVES = {
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.MXFP4: (),
    Type.NVFP4: (),
}
every_type = pytest.mark.parametrize("kind", HALVES, ids=lambda kind: kind.name)
N_COLS = 768


def random_rows(kind: Type, n_rows: int = 9, seed: int = 0) -> np.ndarray:
    """Rows of random bytes, every quant and packed scale among them, with float16 scales near 1."""
    rng = np.random.default_rng(seed)
    elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (n_rows, N_COLS // elements, n_bytes), dtype=np.uint8)
    for offset in HALVES[kind]:
        halves = rng.normal(size=blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = halves[..., None].view(np.uint8)
    if kind is Type.MXFP4:
        blocks[..., 0] = rng.integers(100, 150, blocks.shape[:2])
        blocks[:2, 0, 0] = (0, 1)  # the subnormal scales
    return np.ascontiguousarray(blocks.reshape(n_rows, -1))


@every_isa
@every_type
def test_dequantize_equals_gguf_py_bit_for_bit(isa, kind):
    rows = random_rows(kind)
    want = kernels.dequantise(rows, kind)
    elements = gguf.GGML_QUANT_SIZES[kind][0]
    for row, values in zip(rows, want, strict=True):
        assert_bits_equal(kernels.dequantize(isa, kind, row, 0, N_COLS), values)
        part = kernels.dequantize(isa, kind, row, elements, elements + 5)
        assert_bits_equal(part, values[elements : 2 * elements + 5])


@every_isa
@every_type
def test_dot_and_axpy(isa, kind):
    rows, x = random_rows(kind), normal(N_COLS)
    w = kernels.dequantise(rows, kind).astype(np.float64)
    bound = (N_COLS + 2) * U * (np.abs(w) @ np.abs(x))
    got = kernels.dot_rows(isa, kind, rows, x)
    assert_within(got, w @ x, bound)
    index = np.array([3, 0, 7], np.int32)
    assert_bits_equal(kernels.dot_rows(isa, kind, rows, x, index), got[index])

    coef = np.array([0.5, 0, -2], np.float32)
    y = normal(N_COLS)
    summed = kernels.axpy_rows(isa, kind, rows, coef, N_COLS, y, index=index)
    terms = np.abs(coef) @ np.abs(w[index]) + np.abs(y)
    assert_within(summed, y + coef @ w[index], (len(coef) + 2) * U * terms)
    begin = 256
    part = kernels.axpy_rows(isa, kind, rows, coef, N_COLS, y[begin:512], begin, index)
    assert_bits_equal(part, summed[begin:512])


@every_type
def test_int8_activations_are_refused(kind):
    with pytest.raises(UsageError, match="activation_type"):
        kernels.dot_rows("scalar", kind, random_rows(kind), normal(N_COLS), activation=Type.Q8_0)


SHAPE = Shape(n_embd=256, n_ff=300, n_heads=8, n_kv_heads=2, head_dim=32)
PROMPT = random_tokens(SHAPE.n_vocab, 24)
WRITABLE = [kind for kind in HALVES if kind is not Type.NVFP4]  # no quantiser writes it well enough


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda kind: kind.name)
def test_every_ffn_mode_of_a_model(kind, tmp_path):
    """All matrices in the type, down_t too, where upstream gives NaN or zeros. Only float32 sums differ from the
    float64 reference on the same stored numbers: eps x sqrt(n) x depth, some 1e-6.
    """
    weights = without_predictors(random_weights(SHAPE, 0))
    path = write_gguf(
        tmp_path / "m.gguf",
        SHAPE,
        weights,
        type_of=lambda name: kind if name.startswith("blk") else Type.F32,
        keys={"powerinfer.activation": "relu"},
    )
    want = Reference.load(path).logits(PROMPT)
    for ffn in ("dense", "exact"):
        with Model.load(path, threads=2, kv_type="f32", ffn=ffn) as model:
            assert relative_l2(model.logits(PROMPT), want) <= 1e-4
            assert relative_l2(decode(model, PROMPT), want) <= 1e-4
