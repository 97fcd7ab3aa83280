"""What a conversion reads from: one protocol, which checkpoints and GGUF files both meet."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.artifact import Origin
from powerinfer_toolkit.convert.activations import Statistics
from powerinfer_toolkit.convert.config import ModelConfig
from powerinfer_toolkit.convert.elements import Array, Entry, RawTensor
from powerinfer_toolkit.convert.parameters import Parameter
from powerinfer_toolkit.gguf_format import Dialect, NeuronOrder
from powerinfer_toolkit.gguf_keys import PackedKey
from powerinfer_toolkit.tokenizer_format import TokenizerModel
from powerinfer_toolkit.tokenizer_keys import MetadataEntry


class PredictorWeights(Protocol):
    """The predictors of every layer: fc1 [rank, n_embd] and fc2 [n_ff, rank], read one at a time.

    `ranks` has one rank a layer. Rows of a source's own fc2 are numbered as its neurons, of others as the
    checkpoint's. `source_sha256` is the hash of the weights they were trained for, "" if unsaid. `exact_layers`
    says whose predictors are all zero: predicted mode computes these layers exactly. `measured` has the keys of
    what their training measured, none where the source has them itself.
    """

    ranks: list[int]
    sparse_threshold: float
    source_sha256: str
    exact_layers: list[bool]
    measured: list[MetadataEntry]
    origins: dict[str, Origin]

    def entry(self, layer: int, name: str) -> Entry:
        """Return type and shape of FC1 or FC2 of a layer."""
        ...

    def read(self, layer: int, name: str) -> RawTensor:
        """Return FC1 or FC2 of a layer."""
        ...

    def hashes(self) -> dict[str, str]:
        """Return role -> SHA-256 of what was read so far."""
        ...


class Source(Protocol):
    """A model to convert; all but the weights has been read and checked when it exists.

    `keys` are the metadata that an output takes over. `dialect` is None for a checkpoint and a dense file.
    `is_file` says that types and settings can be kept as they are. `statistics` are in the checkpoint's
    neuron order. `source_sha256` is the hash of the original weights, "" while it is unknown.
    """

    is_file: bool
    config: ModelConfig
    tokenizer: TokenizerModel | None
    parameters: list[Parameter]
    entries: dict[str, Entry]
    keys: list[PackedKey]
    dialect: Dialect | None
    neuron_order: NeuronOrder
    predictors: PredictorWeights | None
    statistics: Statistics | None
    origins: dict[str, Origin]
    history: list[dict[str, Any]]
    source_sha256: str

    def read(self, name: str) -> RawTensor:
        """Return one tensor as it is stored; its bytes enter hashes()."""
        ...

    def row_order(self, parameter: Parameter) -> Array | None:
        """Return the stored row at every row of GGUF's convention (rope), None where they agree."""
        ...

    def original_neurons(self) -> NDArray[np.int32] | None:
        """Return the checkpoint's neuron at every place of the source [n_layers, n_ff], None: the same.

        PiError where it is not known.
        """
        ...

    def hashes(self) -> dict[str, str]:
        """Return role -> SHA-256 of what was read so far."""
        ...
