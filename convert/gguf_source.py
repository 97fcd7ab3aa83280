"""A GGUF file, PowerInfer's magic included, as a source of a conversion."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGUFValueType as ValueType
from numpy.typing import NDArray

from powerinfer_toolkit import console
from powerinfer_toolkit.artifact import Manifest, Origin
from powerinfer_toolkit.convert.activations import Statistics
from powerinfer_toolkit.convert.elements import Array, Entry, RawTensor
from powerinfer_toolkit.convert.gguf_config import is_sparse, number, read_gguf_config
from powerinfer_toolkit.convert.gguf_file import GgufFile, damaged
from powerinfer_toolkit.convert.hashing import TensorHash
from powerinfer_toolkit.convert.metadata import source_keys
from powerinfer_toolkit.convert.parameters import Parameter, check_parameters, expected_parameters
from powerinfer_toolkit.convert.predictors import FC1, FC2
from powerinfer_toolkit.convert.roles import MODEL_FILE, WEIGHTS, placeholder
from powerinfer_toolkit.convert.sidecar import read_sidecar, sidecar_path
from powerinfer_toolkit.convert.source import PredictorWeights
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import (
    PWRI_MAGIC,
    Activation,
    Dialect,
    Key,
    NeuronOrder,
    Tensor,
    TensorType,
)
from powerinfer_toolkit.gguf_keys import PackedKey, pack
from powerinfer_toolkit.tokenizer_format import TokenizerModel
from powerinfer_toolkit.tokenizer_keys import MetadataEntry
from powerinfer_toolkit.tokenizer_rebuild import tokenizer_from_keys
from powerinfer_toolkit.tokenizer_values import TokenizerValues

_PARTS = {FC1: Tensor.PREDICTOR_FC1, FC2: Tensor.PREDICTOR_FC2}
_NOT_KEPT = ("general.alignment", "split.")  # of the container, which is written anew


class GgufSource:
    """The Source protocol over a model file; see there for the attributes. Raises PiError.

    `hidden_act` is the activation that the user names for a file that does not say.
    """

    is_file = True

    def __init__(self, path: Path, hidden_act: Activation | None = None) -> None:
        self._file = GgufFile(path)
        self.config = read_gguf_config(self._file, hidden_act)
        self.entries = self._file.entries
        self._hash = TensorHash()
        self.dialect = self._dialect()
        self.parameters = expected_parameters(self.config, self._names())
        self._check()
        self.predictors: PredictorWeights | None = self._predictors()
        self.neuron_order = self._neuron_order()
        self.statistics: Statistics | None
        self.statistics, self._permutation = self._sidecar()
        self.source_sha256 = str(self._file.value(Key.SOURCE_SHA256, ""))
        self.tokenizer, added = self._tokenizer()
        self._set_provenance(path, added)

    def _dialect(self) -> Dialect | None:
        if not is_sparse(self._file):
            return None
        return Dialect.UPSTREAM if self._file.magic == PWRI_MAGIC else Dialect.EXTENDED

    def _names(self) -> dict[str, str]:
        """Return the tensors of this file by template: down as it is stored, factors where there are some."""
        names = {name: name for name in self.config.arch.tensors.values()}
        if self.dialect is not None:
            names = {Tensor.FFN_DOWN_T if name == Tensor.FFN_DOWN else name: name for name in names}
            names[Tensor.FFN_DOWN_T] = Tensor.FFN_DOWN_T
        if Tensor.ROPE_FREQS in self.entries:
            names[Tensor.ROPE_FREQS] = Tensor.ROPE_FREQS
        return names

    def _check(self) -> None:
        predictors = {
            template.format(i=layer)
            for template in _PARTS.values()
            for layer in range(self.config.n_layers)
        }
        check_parameters(
            self.parameters,
            self.entries,
            tuple(member.name for member in TensorType),
            lambda name: name in predictors,
            "is the file whole, and of a plain Llama-like model?",
        )

    def _predictors(self) -> GgufPredictors | None:
        """Return trained predictors; all-zero ones (kind all_active) stand for none."""
        if not any(template.format(i=0) in self.entries for template in _PARTS.values()):
            return None
        if self._file.value(Key.PREDICTOR_KIND, "mlp") == "all_active":
            return None
        return GgufPredictors(self, number(self._file, Key.SPARSE_THRESHOLD, 0.0))

    def _neuron_order(self) -> NeuronOrder:
        named = self._file.value(Key.NEURON_ORDER, NeuronOrder.ORIGINAL)
        if named not in list(NeuronOrder):
            raise damaged(self._file.path, f"{Key.NEURON_ORDER} is {named!r:.80}")
        return NeuronOrder(named)

    def _sidecar(self) -> tuple[Statistics | None, NDArray[np.int32] | None]:
        """Return counts and permutation from the file beside this one, if it is there and belongs to it."""
        path = sidecar_path(self._file.path)
        if not path.is_file():
            return None, None
        statistics, permutation = read_sidecar(path, self.config)
        if statistics.sha256 != self._file.value(Key.STATISTICS_SHA256):
            raise PiError(
                f"{path} does not belong to {self._file.path.name}: other activation counts",
                hint="put the right one there, or move it away",
            )
        return statistics, permutation

    def _tokenizer(self) -> tuple[TokenizerModel | None, list[MetadataEntry]]:
        """Return the kind of tokenizer, and the whole of it where the file has only llama.cpp's keys."""
        values, kind = TokenizerValues(self._file.value), None
        try:
            kind = values.model
            if Key.TOKENIZER_JSON in self._file.keys:
                return kind, []
            spec = json.loads(tokenizer_from_keys(values).to_str())
        except PiError as failure:
            console.warning(f"the tokenizer's keys are kept, but not embedded: {failure.message}")
            return kind, []
        text = json.dumps(spec, ensure_ascii=False, separators=(",", ":"))
        return kind, [MetadataEntry(Key.TOKENIZER_JSON, ValueType.STRING, text)]

    def _set_provenance(self, path: Path, added: list[MetadataEntry]) -> None:
        """Set keys, origins and history: those of the file, and the file itself."""
        own = Origin(path.name, sha256=placeholder(MODEL_FILE))
        text = self._file.value(Key.MANIFEST)
        if text is not None:
            manifest = Manifest.from_json(str(text), where=path)
            self.origins, self.history = manifest.origins, manifest.with_history()
        else:
            self.origins, self.history = {WEIGHTS: own}, []
        self.origins = self.origins | {MODEL_FILE: own}
        named = source_keys(path.name, "", placeholder(MODEL_FILE))
        added = [*added, *(entry for entry in named if entry.name not in self._file.keys)]
        kept = [key for name, key in self._file.keys.items() if not name.startswith(_NOT_KEPT)]
        self.keys: list[PackedKey] = [*kept, *map(pack, added)]

    def read(self, name: str) -> RawTensor:
        """Return one tensor as it is stored; its bytes enter hashes()."""
        raw = self._file.read(name)
        self._hash.add(name, self.entries[name], raw)
        return raw

    def row_order(self, parameter: Parameter) -> Array | None:
        """Return None: rope's pairs are neighbours already."""
        return None

    def original_neurons(self) -> NDArray[np.int32] | None:
        """Return the checkpoint's neuron at every place, from the sidecar; PiError where that is missing."""
        if self.neuron_order is NeuronOrder.HOT_FIRST and self._permutation is None:
            sidecar = sidecar_path(self._file.path)
            raise PiError(
                f"{self._file.path.name} has its neurons hot first, and {sidecar.name}, which knows their "
                "original numbers, is not beside it",
                hint=f"put {sidecar.name} beside it, or convert from the checkpoint",
            )
        return self._permutation

    def exact_layers(self) -> list[bool]:
        """Return which layers predicted mode computes exactly."""
        n_layers = self.config.n_layers
        flags = self._file.value(Key.PREDICTOR_EXACT_LAYERS, [False] * n_layers)
        if not isinstance(flags, list) or len(flags) != n_layers:
            raise damaged(
                self._file.path, f"{Key.PREDICTOR_EXACT_LAYERS} has not {n_layers} values"
            )
        return [bool(flag) for flag in flags]

    def hashes(self) -> dict[str, str]:
        """Return the hash of this file's tensors."""
        return {MODEL_FILE: self._hash.hexdigest()}


class GgufPredictors:
    """The predictors of a model file, as PredictorWeights. Raises PiError where a layer has none."""

    source_sha256 = ""

    def __init__(self, source: GgufSource, sparse_threshold: float) -> None:
        self._source = source
        self.sparse_threshold = sparse_threshold
        self.origins: dict[str, Origin] = {}  # the file's own manifest names theirs
        self.ranks = [self._checked_rank(layer) for layer in range(source.config.n_layers)]
        self.exact_layers = source.exact_layers()
        self.measured: list[MetadataEntry] = []  # the file's own keys are kept

    def _checked_rank(self, layer: int) -> int:
        config = self._source.config
        for template in _PARTS.values():
            name = template.format(i=layer)
            if name not in self._source.entries:
                raise PiError(f"the file lacks {name}", hint="--no-predictors leaves them all out")
        fc1, fc2 = (self.entry(layer, part).shape for part in _PARTS)
        if fc1[1:] != (config.n_embd,) or fc2 != (config.n_ff, fc1[0]):
            raise PiError(
                f"layer {layer}: fc1 is {list(fc1)} and fc2 is {list(fc2)}; this model needs "
                f"[rank, {config.n_embd}] and [{config.n_ff}, rank]",
                hint="--no-predictors leaves them out",
            )
        return fc1[0]

    def entry(self, layer: int, name: str) -> Entry:
        """Return type and shape of FC1 or FC2 of a layer."""
        return self._source.entries[_PARTS[name].format(i=layer)]

    def read(self, layer: int, name: str) -> RawTensor:
        """Return FC1 or FC2 of a layer; it enters the source's hash."""
        return self._source.read(_PARTS[name].format(i=layer))

    def hashes(self) -> dict[str, str]:
        """Return nothing: the source's hash covers them."""
        return {}
