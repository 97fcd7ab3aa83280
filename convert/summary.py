"""What pi-convert says of a conversion before it begins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from powerinfer_toolkit import console
from powerinfer_toolkit.convert.conversion import Conversion
from powerinfer_toolkit.convert.layout import OutputTensor


def table(conversion: Conversion) -> Iterator[str]:
    """Yield one line a tensor: name, shape, type, bytes."""
    width = max(len(tensor.name) for tensor in conversion.tensors)
    for tensor in conversion.tensors:
        shape = " x ".join(map(str, tensor.shape))
        yield f"{tensor.name:{width}}  {shape:>16}  {tensor.type.name:6}  {tensor.n_bytes:>14}"


def describe(conversion: Conversion) -> None:
    """Say what is written: kind of model and layout, how many matrices of which types, how many bytes."""
    layout, tensors = conversion.layout, conversion.tensors
    config = layout.source.config
    kind = f"{layout.dialect} dialect" if layout.dialect else "plain dense"
    size = sum(tensor.n_bytes for tensor in tensors)
    console.info(
        f"{config.activation} {config.arch.gguf_name}, {kind}, {layout.outtype or 'types kept'}: "
        f"{len(tensors)} tensors, {size / 1e6:,.1f} MB"
    )
    matrices = Counter(tensor.type.name for tensor in tensors if len(tensor.shape) > 1)
    fallen = sum(tensor.fell_back for tensor in tensors)
    console.info(
        "matrices: "
        + ", ".join(f"{count} {name}" for name, count in matrices.most_common())
        + (f" ({fallen} of them another type than asked for)" if fallen else "")
    )
    if layout.sink_layers:
        layers = ", ".join(map(str, sorted(layout.sink_layers)))
        console.info(
            f"layers {layers} feed an attention sink: their ffn_down_t stays F16, attn_v takes more bits"
        )


def warn(conversion: Conversion) -> None:
    """Warn of matrices that take another type than asked for, and of those that are rounded twice."""
    _warn_of_fallbacks([tensor for tensor in conversion.tensors if tensor.fell_back])
    twice = [tensor for tensor in conversion.tensors if tensor.requantised]
    if twice:
        changes = Counter(f"{tensor.source_type} -> {tensor.type.name}" for tensor in twice)
        console.warning(
            f"{len(twice)} matrices are quantised already and are quantised again ({_counts(changes)}): "
            "errors add up; convert from the checkpoint where there is one"
        )


def _warn_of_fallbacks(fallen: list[OutputTensor]) -> None:
    if not fallen:
        return
    changes = Counter(
        f"{tensor.wanted.name} -> {tensor.type.name}" for tensor in fallen if tensor.wanted
    )
    console.warning(
        f"{len(fallen)} matrices have rows that are no multiple of 256 and take another type: "
        f"{_counts(changes)}"
    )
    for tensor in fallen:
        console.detail(f"{tensor.name}: rows of {tensor.shape[-1]}, {tensor.type.name}")


def _counts(changes: Counter[str]) -> str:
    return ", ".join(f"{change} ({count})" for change, count in changes.items())
