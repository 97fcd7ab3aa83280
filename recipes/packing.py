"""Both model files of a run: the sparse one with predictors and counts, the dense one in the same types."""

from __future__ import annotations

import shutil
from typing import Any

from powerinfer_toolkit.convert.cli import NEURON_ORDERS
from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.outtypes import OutType
from powerinfer_toolkit.convert.settings import ConvertSettings
from powerinfer_toolkit.convert.summary import describe, warn
from powerinfer_toolkit.gguf_format import Dialect
from powerinfer_toolkit.recipes.stages import Run
from powerinfer_toolkit.statistics import FILE_NAME


def check_source(run: Run) -> None:
    """Refuse a dense model that cannot become a file, before it is trained on for hours. Raises PiError."""
    prepare(_dense(run))


def pack(run: Run) -> None:
    """Write both files. Raises PiError."""
    for settings in (_dense(run), _sparse(run)):
        shutil.rmtree(settings.output.parent, ignore_errors=True)  # what was killed half-way
        settings.output.parent.mkdir()
        conversion = prepare(settings)
        warn(conversion)
        describe(conversion)
        conversion.write()


def _dense(run: Run) -> ConvertSettings:
    return ConvertSettings(run.source, run.dense, **_common(run))


def _sparse(run: Run) -> ConvertSettings:
    section = run.settings["convert"]
    return ConvertSettings(
        str(run.checkpoint),
        run.model,
        dialect=None if section.dialect == "auto" else Dialect(section.dialect),
        predictors=run.predictors,
        activations=run.statistics / FILE_NAME,
        neuron_order=NEURON_ORDERS[section.neuron_order],
        outlier_ratio=section.outlier_ratio,
        upstream_sidecar=section.upstream_sidecar,
        **_common(run),
    )


def _common(run: Run) -> dict[str, Any]:
    section = run.settings["convert"]
    return {
        "outtype": OutType(section.outtype),
        "allow_nonfinite": section.allow_nonfinite,
    }
