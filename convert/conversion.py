"""From a checkpoint or a model file to a GGUF file: everything checked first, then written."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.artifact import Manifest, Origin, check_target, new_directory, new_file
from powerinfer_toolkit.convert.activations import Statistics, read_statistics
from powerinfer_toolkit.convert.checkpoint_source import CheckpointSource
from powerinfer_toolkit.convert.dialect import choose_dialect
from powerinfer_toolkit.convert.gguf_source import GgufSource
from powerinfer_toolkit.convert.importance import ImportanceMatrix, read_importance
from powerinfer_toolkit.convert.layout import Layout, OutputTensor, ffn_types, output_tensors
from powerinfer_toolkit.convert.metadata import merged, output_keys
from powerinfer_toolkit.convert.neurons import NeuronPlaces, compose
from powerinfer_toolkit.convert.outliers import OUTLIER_RATIO, sink_layers
from powerinfer_toolkit.convert.outtypes import OutType, recipe
from powerinfer_toolkit.convert.pack import write_gguf
from powerinfer_toolkit.convert.predictors import Predictors
from powerinfer_toolkit.convert.roles import ACTIVATIONS, IMPORTANCE, PREDICTORS, with_hashes
from powerinfer_toolkit.convert.settings import ConvertSettings
from powerinfer_toolkit.convert.sidecar import (
    sidecar_path,
    upstream_paths,
    write_sidecar,
    write_upstream_layer,
)
from powerinfer_toolkit.convert.source import PredictorWeights, Source
from powerinfer_toolkit.convert.torch_file import require_torch
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.gguf_format import (
    GGUF_MAGIC,
    PWRI_MAGIC,
    Activation,
    Dialect,
    Key,
    NeuronOrder,
    Tensor,
)
from powerinfer_toolkit.gguf_keys import PackedKey, pack
from powerinfer_toolkit.gguf_types import WEIGHED, is_packed
from powerinfer_toolkit.hub import locate


@dataclass(frozen=True)
class Conversion:
    """A conversion that passed every check which needs no weights; write() does it."""

    settings: ConvertSettings
    layout: Layout
    keys: list[PackedKey]
    tensors: list[OutputTensor]
    statistics: Statistics | None
    manifest: Manifest

    def write(self) -> None:
        """Write the model and its sidecars; on failure none of them changes. Raises PiError."""
        magic = PWRI_MAGIC if self.layout.dialect is Dialect.UPSTREAM else GGUF_MAGIC
        with contextlib.ExitStack() as outputs:  # all are renamed into place after all were written
            model = outputs.enter_context(new_file(self.settings.output, force=self.settings.force))
            sidecars = self._open_sidecars(outputs) if self.statistics is not None else []
            write_gguf(
                model,
                magic,
                self.keys,
                self.tensors,
                self._hashes,
                allow_nonfinite=self.settings.allow_nonfinite,
            )
            if self.statistics is not None:
                self._write_sidecars(sidecars, self.statistics)

    def _hashes(self) -> dict[str, str]:
        """Return role -> hash when all was read, and refuse what was made for other weights."""
        hashes = self.layout.source.hashes()
        named = next((key.value() for key in self.keys if key.name == Key.SOURCE_SHA256), "")
        weights = with_hashes(named, hashes)
        if self.layout.predictors is not None:
            hashes |= self.layout.predictors.hashes()
        _check_fingerprints(self.layout.predictors, self.statistics, weights)
        return hashes

    def _open_sidecars(self, outputs: contextlib.ExitStack) -> list[Path]:
        """Return temporary names: of the sidecar, then of upstream's files by layer if they are wanted."""
        paths = [sidecar_path(self.settings.output)]
        if self.settings.upstream_sidecar:
            n_layers = self.layout.source.config.n_layers
            upstream = upstream_paths(self.settings.output, n_layers)
            outputs.enter_context(new_directory(upstream[0].parent))
            paths += upstream
        force = self.settings.force
        return [outputs.enter_context(new_file(path, force=force)) for path in paths]

    def _write_sidecars(self, paths: list[Path], statistics: Statistics) -> None:
        order = _file_order(self.layout)
        manifest = with_hashes(self.manifest.to_json(), self._hashes())
        write_sidecar(paths[0], statistics, order, manifest)
        for layer, path in enumerate(paths[1:]):
            write_upstream_layer(path, statistics.counts[layer][order[layer]])


def _file_order(layout: Layout) -> NDArray[np.int32]:
    """Return the original neuron at every place of the file, [n_layers, n_ff]."""
    if layout.neurons.original is not None:
        return layout.neurons.original
    config = layout.source.config
    return np.tile(np.arange(config.n_ff, dtype=np.int32), (config.n_layers, 1))


def check_outputs(settings: ConvertSettings) -> None:
    """Refuse outputs that cannot be written, before anything long begins. Raises PiError."""
    check_target(settings.output, force=settings.force)
    if settings.activations is not None:
        check_target(sidecar_path(settings.output), force=settings.force)
    if settings.upstream_sidecar:
        require_torch("--upstream-sidecar")


def prepare(settings: ConvertSettings) -> Conversion:
    """Read configuration, headers, tokenizer and statistics, and decide every tensor and key. Raises PiError."""
    source = open_source(settings)
    outtype = settings.outtype
    if outtype is None and not source.is_file:
        outtype = OutType.F16
    dialect = choose_dialect(settings.dialect, source, ffn_types(source, outtype))
    predictors = _predictors(settings, source)
    statistics = _statistics(settings, source)
    _check_fingerprints(predictors, statistics, source.source_sha256)
    neurons = place_neurons(settings, source, statistics)
    importance = None if settings.imatrix is None else read_importance(settings.imatrix)
    sinks = _sink_layers(settings, source, outtype, dialect)
    layout = Layout(source, outtype, dialect, neurons, predictors, importance, sinks)
    tensors = output_tensors(layout)
    if importance is not None:
        _check_importance(importance, tensors)
    manifest = _manifest(layout, statistics, _outlier_ratio(settings))
    new = [pack(entry) for entry in output_keys(layout, statistics, manifest)]
    keys = merged(source.keys, layout, statistics, new)
    return Conversion(settings, layout, keys, tensors, statistics, manifest)


def _sink_layers(
    settings: ConvertSettings, source: Source, outtype: OutType | None, dialect: Dialect | None
) -> frozenset[int]:
    """Return whose ffn_down_t stays in 16 bits; weights are read only where that can be."""
    ratio = _outlier_ratio(settings)
    if outtype is None or dialect is None or not ratio:
        return frozenset()
    if not any(is_packed(wanted) for wanted in recipe(outtype).types_of(Tensor.FFN_DOWN)):
        return frozenset()
    return sink_layers(source, ratio)


def _outlier_ratio(settings: ConvertSettings) -> float:
    return OUTLIER_RATIO if settings.outlier_ratio is None else settings.outlier_ratio


def open_source(settings: ConvertSettings) -> Source:
    """Return the model file or the checkpoint that the settings name. Raises PiError."""
    if settings.is_file:
        return GgufSource(Path(settings.source), settings.hidden_act)
    return CheckpointSource(locate(settings.source))


def _predictors(settings: ConvertSettings, source: Source) -> PredictorWeights | None:
    if settings.drop_predictors:
        return None
    if settings.predictors is None and source.predictors is None:
        return None
    if source.config.activation is not Activation.RELU:
        raise PiError(
            "predictors are for ReLU models; this one has SiLU, whose neurons are never off",
            hint="make the model ReLU-sparse first, or leave the predictors out",
        )
    if settings.predictors is None:
        return source.predictors
    return Predictors(settings.predictors, source.config)


def _check_fingerprints(
    predictors: PredictorWeights | None, statistics: Statistics | None, weights_sha256: str
) -> None:
    """Refuse predictors and statistics that say they belong to other weights; "" where one is not known."""
    for what, made in (("predictors", predictors), ("activation counts", statistics)):
        if made is not None and weights_sha256 and made.source_sha256 not in ("", weights_sha256):
            raise PiError(
                f"the {what} belong to weights {made.source_sha256[:16]}, these are "
                f"{weights_sha256[:16]}",
                hint=f"are these {what} of another model?",
            )


def _statistics(settings: ConvertSettings, source: Source) -> Statistics | None:
    if settings.activations is None:
        statistics = source.statistics
    else:
        statistics = read_statistics(
            settings.activations, source.config, settings.activation_tokens
        )
    if statistics is None and settings.upstream_sidecar:
        raise UsageError("--upstream-sidecar needs --activations", hint="name the counts")
    return statistics


def place_neurons(
    settings: ConvertSettings, source: Source, statistics: Statistics | None
) -> NeuronPlaces:
    """Return the order of the output's neurons: as asked for, hot first by new counts, else as it is."""
    wanted = settings.neuron_order
    if wanted is NeuronOrder.HOT_FIRST and statistics is None:
        raise UsageError("--neuron-order hot-first needs --activations", hint="name the counts")
    if wanted is None and settings.activations is not None:
        wanted = NeuronOrder.HOT_FIRST
    if wanted is None:
        named = statistics is not None or settings.predictors is not None
        return NeuronPlaces(source.neuron_order, source.original_neurons() if named else None, None)
    original = None
    if wanted is NeuronOrder.HOT_FIRST and statistics is not None:
        original = statistics.hot_first()
    return NeuronPlaces(wanted, original, compose(source.original_neurons(), original))


def _check_importance(importance: ImportanceMatrix, tensors: list[OutputTensor]) -> None:
    if not any(tensor.type in WEIGHED for tensor in tensors):
        raise UsageError(
            "no matrix of this output takes an importance matrix",
            hint=f"types that do: {', '.join(member.name for member in WEIGHED)}",
        )
    importance.check_names({tensor.name for tensor in tensors})


def _manifest(layout: Layout, statistics: Statistics | None, outlier_ratio: float) -> Manifest:
    origins = dict(layout.source.origins)
    if not layout.keeps_predictors:
        origins.pop(PREDICTORS, None)
    if layout.predictors is not None:
        origins |= layout.predictors.origins
    if statistics is not None and statistics is not layout.source.statistics:
        origins[ACTIVATIONS] = Origin(statistics.name, sha256=statistics.sha256)
    if layout.importance is not None:
        origins[IMPORTANCE] = Origin(layout.importance.name, sha256=layout.importance.sha256)
    settings: dict[str, str | int | float | bool] = {
        "outtype": str(layout.outtype or "kept"),
        "dialect": str(layout.dialect or "dense"),
        "neuron_order": str(layout.neurons.kind),
    }
    if layout.sink_layers:
        settings["outlier_ratio"] = outlier_ratio
    return Manifest(
        kind="model",
        origins=origins,
        settings=settings,
        history=layout.source.history,
    )
