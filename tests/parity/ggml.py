"""ggml's own quantisers and dequantisers, out of the library that xllamacpp ships."""

from __future__ import annotations

import ctypes as ct
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

_SUFFIX = {Type.Q2_K: "q2_K", Type.Q3_K: "q3_K", Type.Q4_K: "q4_K", Type.Q5_K: "q5_K"}
_SUFFIX |= {Type.Q6_K: "q6_K"}


class Ggml:
    """Reference conversions of llama.cpp; ImportError or OSError where its library is not installed."""

    def __init__(self) -> None:
        import xllamacpp

        library = ct.CDLL(next(Path(xllamacpp.__file__).parent.glob("*.so")))
        self._library = library
        self._quantise = library.ggml_quantize_chunk
        self._quantise.restype = ct.c_size_t
        self._quantise.argtypes = [
            ct.c_int,
            ct.c_void_p,
            ct.c_void_p,
            *[ct.c_int64] * 3,
            ct.c_void_p,
        ]

    def quantise(
        self, rows: NDArray[np.float32], kind: Type, importance: NDArray[np.float32] | None = None
    ) -> NDArray[np.uint8]:
        """rows [n, n_columns] -> bytes [n, row_bytes]."""
        n_elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        out = np.empty((len(rows), rows.shape[1] // n_elements * n_bytes), np.uint8)
        weights = None if importance is None else importance.ctypes.data
        rows = np.ascontiguousarray(rows)
        self._quantise(kind, rows.ctypes.data, out.ctypes.data, 0, *rows.shape, weights)
        return out

    def dequantise(self, data: NDArray[np.uint8], kind: Type) -> NDArray[np.float32]:
        """bytes [n, row_bytes] -> rows [n, n_columns]."""
        n_elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        out = np.empty((len(data), data.shape[1] // n_bytes * n_elements), np.float32)
        function = getattr(self._library, f"dequantize_row_{_SUFFIX.get(kind, kind.name.lower())}")
        function.argtypes = [ct.c_void_p, ct.c_void_p, ct.c_int64]
        data = np.ascontiguousarray(data)
        function(data.ctypes.data, out.ctypes.data, out.size)
        return out
