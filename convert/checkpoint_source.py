"""A Hugging Face checkpoint as a source of a conversion."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.artifact import Origin
from powerinfer_toolkit.convert.activations import Statistics
from powerinfer_toolkit.convert.checkpoint import Checkpoint
from powerinfer_toolkit.convert.config import RopeKind, read_config
from powerinfer_toolkit.convert.elements import WEIGHT_DTYPES, Array, Entry, RawTensor
from powerinfer_toolkit.convert.metadata import architecture_keys, general_keys, source_keys
from powerinfer_toolkit.convert.parameters import Parameter, check_parameters, expected_parameters
from powerinfer_toolkit.convert.roles import WEIGHTS, placeholder
from powerinfer_toolkit.convert.rope import interleaved_rows, llama3_factors
from powerinfer_toolkit.convert.source import PredictorWeights
from powerinfer_toolkit.gguf_format import Dialect, NeuronOrder, Tensor
from powerinfer_toolkit.gguf_keys import pack
from powerinfer_toolkit.hub import LocalModel
from powerinfer_toolkit.tokenizer_format import TokenizerModel
from powerinfer_toolkit.tokenizer_keys import tokenizer_metadata

# Buffers that old checkpoints carry; the frequencies follow from config.json.
_BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class CheckpointSource:
    """The Source protocol over a checkpoint directory; see there for the attributes. Raises PiError.

    Factors of llama3 rope scaling are a parameter of their own, made from config.json.
    """

    is_file = False
    dialect: Dialect | None = None
    neuron_order = NeuronOrder.ORIGINAL
    predictors: PredictorWeights | None = None
    statistics: Statistics | None = None
    source_sha256 = ""

    def __init__(self, model: LocalModel) -> None:
        self.config = read_config(model.path)
        self._weights = Checkpoint(model.path)
        names = {gguf_name: name for name, gguf_name in self.config.arch.tensors.items()}
        self.parameters = expected_parameters(self.config, names)
        self.entries = self._weights.entries
        check_parameters(
            self.parameters,
            self.entries,
            WEIGHT_DTYPES,
            self._is_ignored,
            "does config.json belong to these weights?",
        )
        self._add_rope_factors()
        tokenizer = tokenizer_metadata(model.path, self.config.n_vocab)
        self.tokenizer: TokenizerModel | None = tokenizer.model
        digest = placeholder(WEIGHTS)
        entries = [
            *architecture_keys(self.config),
            *general_keys(model.name),
            *source_keys(model.name, model.revision, digest),
            *tokenizer.keys,
        ]
        self.keys = [pack(entry) for entry in entries]
        self.origins = {WEIGHTS: Origin(model.name, model.revision, digest)}
        self.history: list[dict[str, Any]] = []

    def _is_ignored(self, name: str) -> bool:
        repeated_head = self.config.tied_embeddings and name == "lm_head.weight"
        return repeated_head or _BUFFERS.fullmatch(name) is not None

    def _add_rope_factors(self) -> None:
        self._factors = llama3_factors(self.config.rope, self.config.head_dim)
        if self.config.rope.kind is RopeKind.LLAMA3:
            name, shape = Tensor.ROPE_FREQS, self._factors.shape
            self.parameters.append(Parameter(name, name, None, shape))
            self.entries = self.entries | {name: Entry("F32", shape)}

    def read(self, name: str) -> RawTensor:
        """Return one tensor; the checkpoint's enter hashes()."""
        if name == Tensor.ROPE_FREQS:
            return RawTensor("F32", self._factors)
        return self._weights.read(name)

    def row_order(self, parameter: Parameter) -> Array | None:
        """Return the order that turns transformers' split halves into GGUF's pairs, for q and k."""
        if parameter.template not in self.config.arch.rope_permuted:
            return None
        head_dim = self.config.head_dim
        return interleaved_rows(parameter.shape[0] // head_dim, head_dim)

    def original_neurons(self) -> NDArray[np.int32] | None:
        """Return None: the numbering is the checkpoint's own."""
        return None

    def hashes(self) -> dict[str, str]:
        """Return the hash of the weights."""
        return {WEIGHTS: self._weights.sha256()}
