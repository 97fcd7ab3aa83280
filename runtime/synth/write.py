"""Write a synthetic model: from a shape and a wanted sparsity to a GGUF file, in bounded memory."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from powerinfer_toolkit import console
from powerinfer_toolkit.artifact import Manifest, check_space, check_target, new_file
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.gguf_format import ALIGNMENT, GGUF_MAGIC, TensorType
from powerinfer_toolkit.gguf_header import gguf_header, padded
from powerinfer_toolkit.gguf_keys import PackedKey, pack
from powerinfer_toolkit.gguf_types import block_elements, is_packed, predictor_types
from powerinfer_toolkit.runtime.synth.firing import Firing, Locality, firing
from powerinfer_toolkit.runtime.synth.keys import (
    ffn_keys,
    model_keys,
    origin_keys,
    tokenizer_keys,
)
from powerinfer_toolkit.runtime.synth.pools import Pools, Types
from powerinfer_toolkit.runtime.synth.shapes import SynthShape, find_shape
from powerinfer_toolkit.runtime.synth.tensors import SynthTensor, synth_tensors

_MOST_LAYERS = 4096


@dataclass(frozen=True)
class SynthSettings:
    """What to write; `n_layers` None means the shape's own. `zeros` is the mean share of silent neurons."""

    shape: str
    output: Path
    outtype: TensorType = TensorType.Q4_0
    zeros: float = 0.9
    locality: Locality = Locality.SMOLLM2
    n_layers: int | None = None
    dense_twin: bool = False
    force: bool = False


def write_synth(settings: SynthSettings) -> int:
    """Write the model and return its size in bytes.

    Raises UsageError for a shape or a share that cannot be had, PiError for a target that cannot be written. The
    seed is the shape's: the same settings give the same bytes, and a twin has its model's attention, gate and up.
    """
    shape = find_shape(settings.shape)
    n_layers = _checked_layers(settings.n_layers, shape)
    _check_zeros(settings)
    _check_blocks(settings.outtype, shape)
    check_target(settings.output, force=settings.force)
    neurons = firing(shape.n_ff, settings.locality, settings.zeros)
    seed = zlib.crc32(shape.name.encode())
    pools = Pools(shape, n_layers, _types(settings.outtype), neurons, seed)
    tensors = list(synth_tensors(pools, dense_twin=settings.dense_twin))
    keys = _keys(settings, shape, n_layers, neurons, seed)
    header = gguf_header(GGUF_MAGIC, keys, tensors)
    size = len(header) + sum(padded(tensor.n_bytes) for tensor in tensors)
    check_space(settings.output, size)
    with new_file(settings.output, force=settings.force) as temporary:
        _write(temporary, header, tensors)
    return size


def _write(path: Path, header: bytes, tensors: list[SynthTensor]) -> None:
    with path.open("wb") as stream:
        stream.write(header)
        for tensor in console.progress(tensors, total=len(tensors), label="synth", unit="tensor"):
            for rows in tensor.chunks():
                stream.write(rows.data)
            stream.write(bytes(-tensor.n_bytes % ALIGNMENT))
        # Out of the page cache, which keeps written files in small pages: the engine will read it in large ones.
        stream.flush()
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _checked_layers(asked: int | None, shape: SynthShape) -> int:
    if asked is None:
        return shape.n_layers
    if not 1 <= asked <= _MOST_LAYERS:
        raise UsageError(f"{asked} layers are out of range", hint=f"give 1 to {_MOST_LAYERS}")
    return asked


def _check_zeros(settings: SynthSettings) -> None:
    if not 0.05 <= settings.zeros <= 0.99:
        raise UsageError(
            f"a share of zeros of {settings.zeros} cannot be had", hint="give 0.05 to 0.99"
        )


def _check_blocks(matrix: TensorType, shape: SynthShape) -> None:
    if shape.n_embd % block_elements(matrix) != 0:
        raise UsageError(
            f"rows of {shape.n_embd} elements are no whole blocks of {matrix.name}",
            hint="use a type with blocks of 32, such as q8_0 or q4_0",
        )


def _types(matrix: TensorType) -> Types:
    """Return pi-convert's types: below 8 bits the embeddings are Q8_0."""
    embedding = TensorType.Q8_0 if is_packed(matrix) else matrix
    return Types(matrix, embedding, *predictor_types({matrix}))


def _keys(
    settings: SynthSettings, shape: SynthShape, n_layers: int, neurons: Firing, seed: int
) -> list[PackedKey]:
    depth = "" if n_layers == shape.n_layers else f"-{n_layers}-layers"
    twin = "-dense" if settings.dense_twin else ""
    name = f"synthetic-{shape.name}{depth}{twin}"
    manifest = Manifest(
        kind="model",
        origins={},
        settings={
            "synthetic": shape.name,
            "seed": seed,
            "n_layers": n_layers,
            "outtype": settings.outtype.name.lower(),
            "zeros": settings.zeros,
            "locality": str(settings.locality),
            "dense_twin": settings.dense_twin,
        },
    )
    entries = [
        *model_keys(shape, n_layers, name, settings.outtype),
        *tokenizer_keys(shape.n_vocab),
        *ffn_keys(neurons, n_layers, dense_twin=settings.dense_twin),
        *origin_keys(shape, manifest),
    ]
    return [pack(entry) for entry in entries]
