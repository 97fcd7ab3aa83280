"""From a Hugging Face checkpoint to a GGUF file: everything checked first, then written."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.artifact import Manifest, Origin, check_target, new_directory, new_file
from powerinfer_toolkit.convert.activations import Statistics, read_statistics
from powerinfer_toolkit.convert.checkpoint import Checkpoint
from powerinfer_toolkit.convert.config import ModelConfig, read_config
from powerinfer_toolkit.convert.dialect import choose_dialect
from powerinfer_toolkit.convert.layout import Layout, OutputTensor, output_tensors
from powerinfer_toolkit.convert.metadata import (
    architecture_keys,
    general_keys,
    origin_keys,
    powerinfer_keys,
)
from powerinfer_toolkit.convert.pack import placeholder, write_gguf
from powerinfer_toolkit.convert.parameters import check_parameters, expected_parameters
from powerinfer_toolkit.convert.predictors import Predictors
from powerinfer_toolkit.convert.sidecar import (
    sidecar_path,
    upstream_paths,
    write_sidecar,
    write_upstream_layer,
)
from powerinfer_toolkit.convert.torch_file import require_torch
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.gguf_format import (
    GGUF_MAGIC,
    PWRI_MAGIC,
    Activation,
    Dialect,
    NeuronOrder,
    TensorType,
)
from powerinfer_toolkit.hub import LocalModel, locate
from powerinfer_toolkit.tokenizer_keys import MetadataEntry, TokenizerKeys, tokenizer_metadata

WEIGHTS, PREDICTORS, ACTIVATIONS = "weights", "predictors", "activations"


@dataclass(frozen=True)
class ConvertSettings:
    """What to convert and how; `dialect` and `neuron_order` None choose by what is there.

    `activation_tokens` is the number of tokens the counts were taken over, None: as their file says.
    """

    source: str
    output: Path
    outtype: TensorType = TensorType.F16
    dialect: Dialect | None = None
    predictors: Path | None = None
    activations: Path | None = None
    activation_tokens: int | None = None
    neuron_order: NeuronOrder | None = None
    upstream_sidecar: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        """Refuse options without what they need (UsageError)."""
        if self.activation_tokens is not None and self.activation_tokens < 1:
            raise UsageError("--activation-tokens must be positive")
        if self.activations is not None:
            return
        if self.neuron_order is NeuronOrder.HOT_FIRST:
            raise UsageError("--neuron-order hot-first needs --activations")
        if self.activation_tokens is not None:
            raise UsageError("--activation-tokens needs --activations")
        if self.upstream_sidecar:
            raise UsageError("--upstream-sidecar needs --activations")


@dataclass(frozen=True)
class Conversion:
    """A conversion that passed every check which needs no weights; write() does it."""

    settings: ConvertSettings
    checkpoint: Checkpoint
    layout: Layout
    keys: list[MetadataEntry]
    tensors: list[OutputTensor]
    statistics: Statistics | None
    manifest: Manifest

    def write(self) -> None:
        """Write the model and its sidecars; on failure none of them changes. Raises PiError."""
        magic = PWRI_MAGIC if self.layout.dialect is Dialect.UPSTREAM else GGUF_MAGIC
        name = self.layout.config.arch.gguf_name
        with contextlib.ExitStack() as outputs:  # all are renamed into place after all were written
            model = outputs.enter_context(new_file(self.settings.output, force=self.settings.force))
            sidecars = self._open_sidecars(outputs) if self.statistics is not None else []
            write_gguf(model, magic, name, self.keys, self.tensors, self._hashes)
            if self.statistics is not None:
                self._write_sidecars(sidecars, self.statistics)

    def _hashes(self) -> dict[str, str]:
        hashes = {WEIGHTS: self.checkpoint.sha256()}
        if self.layout.predictors is not None:
            hashes[PREDICTORS] = self.layout.predictors.sha256()
        return hashes

    def _open_sidecars(self, outputs: contextlib.ExitStack) -> list[Path]:
        """Return temporary names: of the sidecar, then of upstream's files by layer if they are wanted."""
        paths = [sidecar_path(self.settings.output)]
        if self.settings.upstream_sidecar:
            upstream = upstream_paths(self.settings.output, self.layout.config.n_layers)
            outputs.enter_context(new_directory(upstream[0].parent))
            paths += upstream
        force = self.settings.force
        return [outputs.enter_context(new_file(path, force=force)) for path in paths]

    def _write_sidecars(self, paths: list[Path], statistics: Statistics) -> None:
        order = _file_order(self.layout)
        write_sidecar(paths[0], statistics, order, self.manifest)
        for layer, path in enumerate(paths[1:]):
            write_upstream_layer(path, statistics.counts[layer][order[layer]])


def _file_order(layout: Layout) -> NDArray[np.int32]:
    """Return the original neuron at every place of the file, [n_layers, n_ff]."""
    if layout.order is not None:
        return layout.order
    n_ff, n_layers = layout.config.n_ff, layout.config.n_layers
    return np.tile(np.arange(n_ff, dtype=np.int32), (n_layers, 1))


def check_outputs(settings: ConvertSettings) -> None:
    """Refuse outputs that cannot be written, before anything long begins. Raises PiError."""
    check_target(settings.output, force=settings.force)
    if settings.activations is not None:
        check_target(sidecar_path(settings.output), force=settings.force)
    if settings.upstream_sidecar:
        require_torch("--upstream-sidecar")


def prepare(settings: ConvertSettings) -> Conversion:
    """Read configuration, headers, tokenizer and statistics, and decide every tensor and key. Raises PiError."""
    model = locate(settings.source)
    config = read_config(model.path)
    checkpoint = Checkpoint(model.path)
    parameters = expected_parameters(config)
    check_parameters(parameters, checkpoint.entries, config)
    tokenizer = tokenizer_metadata(model.path, config.n_vocab)
    dialect = choose_dialect(settings.dialect, config, settings.outtype, tokenizer.model)
    predictors = _predictors(settings, config)
    statistics = None
    if settings.activations is not None:
        statistics = read_statistics(settings.activations, config, settings.activation_tokens)
    order = None
    if statistics is not None and settings.neuron_order is not NeuronOrder.ORIGINAL:
        order = statistics.hot_first()
    layout = Layout(config, settings.outtype, dialect, order, predictors)
    manifest = _manifest(settings, model, layout, statistics)
    return Conversion(
        settings,
        checkpoint,
        layout,
        _keys(model, layout, statistics, manifest, tokenizer),
        output_tensors(layout, checkpoint, parameters),
        statistics,
        manifest,
    )


def _predictors(settings: ConvertSettings, config: ModelConfig) -> Predictors | None:
    if settings.predictors is None:
        return None
    if config.activation is not Activation.RELU:
        raise PiError(
            "--predictors is for ReLU models; this one has SiLU, whose neurons are never off",
            hint="make the model ReLU-sparse first, or leave --predictors out",
        )
    return Predictors(settings.predictors, config)


def _manifest(
    settings: ConvertSettings, model: LocalModel, layout: Layout, statistics: Statistics | None
) -> Manifest:
    origins = {WEIGHTS: Origin(model.name, model.revision, placeholder(WEIGHTS))}
    if layout.predictors is not None:
        origins[PREDICTORS] = Origin(layout.predictors.name, sha256=placeholder(PREDICTORS))
    if statistics is not None:
        origins[ACTIVATIONS] = Origin(statistics.name, sha256=statistics.sha256)
    order = NeuronOrder.ORIGINAL if layout.order is None else NeuronOrder.HOT_FIRST
    return Manifest(
        kind="model",
        origins=origins,
        settings={
            "outtype": settings.outtype.name.lower(),
            "dialect": str(layout.dialect or "dense"),
            "neuron_order": str(order),
        },
    )


def _keys(
    model: LocalModel,
    layout: Layout,
    statistics: Statistics | None,
    manifest: Manifest,
    tokenizer: TokenizerKeys,
) -> list[MetadataEntry]:
    return [
        *general_keys(model, layout.outtype),
        *architecture_keys(layout.config),
        *powerinfer_keys(layout, statistics),
        *origin_keys(model, manifest, placeholder(WEIGHTS)),
        *tokenizer.keys,
    ]
