"""float32 rows as a tensor type stores them: gguf-py's quantisers, libgguf's where it has none."""

from __future__ import annotations

import gguf
import libgguf
import numpy as np
from gguf import GGMLQuantizationType as Type

BY_LIBGGUF = frozenset({Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL})


def encode(values: np.ndarray, type_: Type) -> np.ndarray:
    """[n_rows, n_cols] float32 -> bytes [n_rows, row bytes]; float types keep their dtype."""
    if type_ in BY_LIBGGUF:
        return libgguf.quantize_rows(np.ascontiguousarray(values, np.float32), int(type_))
    return gguf.quants.quantize(values, type_)
