"""The pi_kernel_* functions on numpy arrays."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.native_lib import FloatPtr, Int32Ptr, pointer

FLOAT_TYPES = (Type.F32, Type.F16, Type.BF16)
QUANTISED_TYPES = (Type.Q8_0, Type.Q4_0, Type.Q4_1)
BLOCK = 32
PAGE = 32


def usable_sets() -> list[str]:
    return [name for name, usable in native_lib.instruction_sets() if usable]


def quantise(rows: np.ndarray, kind: Type) -> np.ndarray:
    """[n_rows, n_cols] float32 -> [n_rows, row bytes] as gguf-py stores it."""
    return np.ascontiguousarray(gguf.quants.quantize(rows, kind)).view(np.uint8)


def dequantise(data: np.ndarray, kind: Type) -> np.ndarray:
    """gguf-py's reading of [n_rows, row bytes], float32."""
    native = {Type.F32: np.float32, Type.F16: np.float16}.get(kind)
    data = data if native is None else data.view(native)
    return gguf.quants.dequantize(data, kind).astype(np.float32)


def _floats(array: np.ndarray):
    return pointer(np.ascontiguousarray(array, dtype=np.float32), FloatPtr)


def _index(index: np.ndarray | None):
    return None if index is None else pointer(np.ascontiguousarray(index, np.int32), Int32Ptr)


def dequantize(isa: str, kind: Type, row: np.ndarray, begin: int, n: int) -> np.ndarray:
    out = np.full(n, np.nan, np.float32)
    native_lib.load().pi_kernel_dequantize(
        isa.encode(), kind, row.ctypes.data, begin, n, _floats(out)
    )
    return out


def dot_rows(
    isa: str,
    kind: Type,
    data: np.ndarray,
    x: np.ndarray,
    index: np.ndarray | None = None,
    activation: Type = Type.F32,
) -> np.ndarray:
    """Dot products of x with rows index[i] of data (all of them without an index)."""
    out = np.full(len(data) if index is None else len(index), np.nan, np.float32)
    native_lib.load().pi_kernel_dot_rows(
        *(isa.encode(), kind, activation, data.ctypes.data, _index(index)),
        *(len(out), len(x), _floats(x), _floats(out)),
    )
    return out


def multiply_rows(isa: str, kind: Type, data: np.ndarray, x: np.ndarray) -> np.ndarray:
    """[n_tokens, n_rows]: every row times every token's int8 activations."""
    out = np.full((len(x), len(data)), np.nan, np.float32)
    native_lib.load().pi_kernel_multiply_rows(
        *(isa.encode(), kind, data.ctypes.data, len(data), x.shape[1]),
        *(_floats(x), len(x), _floats(out)),
    )
    return out


def axpy_rows(
    isa: str,
    kind: Type,
    data: np.ndarray,
    coef: np.ndarray,
    n_cols: int,
    y: np.ndarray,
    begin: int = 0,
    index: np.ndarray | None = None,
) -> np.ndarray:
    """y + the sum of coef[i] * row index[i], columns [begin, begin + len(y))."""
    out = np.array(y, np.float32)
    native_lib.load().pi_kernel_axpy_rows(
        *(isa.encode(), kind, data.ctypes.data, _index(index), len(coef), n_cols),
        *(_floats(coef), begin, len(out), _floats(out)),
    )
    return out


def rms_norm(isa: str, x: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    out = np.full_like(x, np.nan)
    native_lib.load().pi_kernel_rms_norm(
        isa.encode(), _floats(x), _floats(gain), len(x), eps, _floats(out)
    )
    return out


def gated(
    isa: str, activation: int, gate: np.ndarray, up: np.ndarray, threshold: float = 0.0
) -> np.ndarray:
    """activation: 0 SiLU, 1 ReLU with a threshold."""
    out = np.full_like(gate, np.nan)
    native_lib.load().pi_kernel_gated(
        *(isa.encode(), activation, threshold, _floats(gate), _floats(up), len(gate), _floats(out))
    )
    return out


def gemm(isa: str, w: np.ndarray, x: np.ndarray, transposed: bool = False) -> np.ndarray:
    """x [n_tokens, n_k] . w^T; w is [n_rows, n_k], or [n_k, n_rows] when transposed."""
    n_rows = w.shape[1] if transposed else w.shape[0]
    out = np.full((len(x), n_rows), np.nan, np.float32)
    native_lib.load().pi_kernel_gemm(
        *(isa.encode(), _floats(w), int(transposed), n_rows, x.shape[1]),
        *(_floats(x), len(x), _floats(out)),
    )
    return out


def attention(
    isa: str, kv_type: Type, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """One head, causal: query i sees positions <= n_positions - n_q + i. Returns output and lse."""
    out, lse = np.full_like(q, np.nan), np.full(len(q), np.nan, np.float32)
    native_lib.load().pi_kernel_attention(
        *(isa.encode(), kv_type, _floats(q), len(q), _floats(k), _floats(v)),
        *(len(k), q.shape[1], scale, _floats(out), _floats(lse)),
    )
    return out, lse
