"""float32 -> output types, with checks of what a type can hold."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.convert.elements import Array
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.gguf_types import is_packed, quantise

READ_ONLY = (TensorType.MXFP4, TensorType.NVFP4)
# Below this magnitude no type overflows: a block's float16 scale and offset are at most twice the
# largest element.
_SAFE_PEAK = 2.0**15
# Above this magnitude libgguf's sums over 256 fourth powers may overflow, and it writes zeros.
_MOST_PACKED = 2.0**28


@dataclass(frozen=True)
class Encoded:
    """Rows in an output type, the largest finite magnitude before, and how many were not finite."""

    data: Array
    peak: float
    n_nonfinite: int


def encode(
    rows: NDArray[np.float32],
    tensor_type: TensorType,
    name: str,
    *,
    packed: Array | None = None,
    importance: NDArray[np.float32] | None = None,
    allow_nonfinite: bool = False,
) -> Encoded:
    """Return `rows` [n, n_columns] in the output type: `packed` where the source has them in it already.

    `importance` [n_columns] weighs the errors of the types in WEIGHED. With `allow_nonfinite` NaN and
    infinities stay in F32, F16 and BF16 and become 0 in the other types, whose blocks share a scale.
    Raises PiError when an element is not finite, or beyond the type's range.
    """
    peak, n_nonfinite = float(max(rows.max(), -rows.min())) if rows.size else 0.0, 0
    if not np.isfinite(peak):
        if not allow_nonfinite:
            raise PiError(
                f"{name} holds NaN or infinite weights",
                hint="the source is damaged: get it again; --allow-nonfinite converts it anyway",
            )
        finite = np.isfinite(rows)
        n_nonfinite = rows.size - int(np.count_nonzero(finite))
        peak = float(np.abs(np.where(finite, rows, 0)).max())
        rows = np.where(finite, rows, np.float32(0)) if is_packed(tensor_type) else rows
    if packed is not None:
        return Encoded(packed, peak, n_nonfinite)
    data = quantise(rows, tensor_type, importance)
    if peak > _SAFE_PEAK and not _in_range(data, tensor_type, rows, peak):
        raise PiError(
            f"{name} holds {peak:.6g}, beyond the range of {tensor_type.name}",
            hint="--outtype bf16 has the range of float32",
        )
    return Encoded(data, peak, n_nonfinite)


def _in_range(data: Array, tensor_type: TensorType, rows: NDArray[np.float32], peak: float) -> bool:
    """Return whether what was finite stays finite."""
    if is_packed(tensor_type) and peak > _MOST_PACKED:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        decoded = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(tensor_type))
    return bool((np.isfinite(decoded) | ~np.isfinite(rows)).all())
