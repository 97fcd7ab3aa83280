"""A recipe: one YAML file with a section a stage, each with exactly the settings of that stage."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from powerinfer_toolkit import settings as schema
from powerinfer_toolkit.convert.cli import NEURON_ORDERS, OUTTYPES
from powerinfer_toolkit.convert.relufy.settings import RelufySettings
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.gguf_format import Dialect
from powerinfer_toolkit.profile_activations.settings import ProfileSettings
from powerinfer_toolkit.recipes.catalog import find
from powerinfer_toolkit.recipes.synthetic import SyntheticSettings
from powerinfer_toolkit.settings import setting
from powerinfer_toolkit.train_predictor.settings import PredictorSettings

OUTPUT_DIR = "{output_dir}"  # in a recipe's text: the directory of the run
TEXTS = ("name", "description", "license")  # keys beside the sections


@dataclass(frozen=True)
class ConvertSection:
    """What a recipe can tell pi-convert; the rest follows from the stages before."""

    outtype: str = setting("f16", "type of the matrices, in the dense file too", choices=OUTTYPES)
    dialect: str = setting(
        "auto", "format of the sparse file", choices=("auto", *(str(d) for d in Dialect))
    )
    neuron_order: str = setting("hot-first", "order of the neurons", choices=tuple(NEURON_ORDERS))
    outlier_ratio: float | None = setting(
        None, "--outlier-ratio of the sparse file; none: pi-convert's default"
    )
    upstream_sidecar: bool = setting(
        False, "also write the counts as PowerInfer's solver reads them"
    )
    allow_nonfinite: bool = setting(False, "convert weights that are NaN or infinite")

    def __post_init__(self) -> None:
        """Refuse a ratio that cannot be meant (UsageError)."""
        if self.outlier_ratio is not None and self.outlier_ratio < 0:
            raise UsageError(f"outlier_ratio is {self.outlier_ratio}", hint="0 quantises all")


def schemas() -> dict[str, type]:
    """Return the settings of every stage, in the order in which the stages run."""
    from powerinfer_toolkit.recipes.verify import VerifySettings

    return {
        "synthetic": SyntheticSettings,
        "relufy": RelufySettings,
        "profile": ProfileSettings,
        "train_predictor": PredictorSettings,
        "convert": ConvertSection,
        "verify": VerifySettings,
    }


@dataclass(frozen=True)
class Recipe:
    """`settings` holds those of every stage that the recipe has, in order; `license` is the source's.

    `name` is the file's own key, else the name under which the recipe was found.
    """

    name: str
    description: str
    license: str
    settings: dict[str, Any]

    @property
    def file_stem(self) -> str:
        """How files made by the recipe are called."""
        return self.name.replace("/", "-")

    def at(self, output_dir: Path) -> dict[str, Any]:
        """Return the settings with the run's directory where the recipe has {output_dir}."""
        found = schemas()
        return {
            stage: schema.resolve(
                found[stage], _replaced(schema.to_mapping(values), str(output_dir)), {}, self.name
            )
            for stage, values in self.settings.items()
        }

    def to_yaml(self) -> str:
        """Return the recipe with every setting, defaults included."""
        texts = {key: getattr(self, key) for key in TEXTS if getattr(self, key)}
        sections = {stage: schema.to_mapping(values) for stage, values in self.settings.items()}
        return schema.dump_yaml(texts | sections)


def _replaced(value: Any, output_dir: str) -> Any:  # noqa: ANN401 - any plain value
    if isinstance(value, str):
        return value.replace(OUTPUT_DIR, output_dir)
    if isinstance(value, list):
        return [_replaced(entry, output_dir) for entry in value]
    if isinstance(value, dict):
        return {key: _replaced(entry, output_dir) for key, entry in value.items()}
    return value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add --SECTION.KEY for every setting of every stage."""
    for stage, settings in schemas().items():
        schema.add_flags(parser, settings, stage)


def given_flags(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return the settings that were given as flags, by stage."""
    return {
        stage: schema.given_flags(args, settings, stage) for stage, settings in schemas().items()
    }


def read(named: str, flags: Mapping[str, Mapping[str, str]] | None = None) -> Recipe:
    """Return a shipped recipe or one from a file, with flags before its values. Raises UsageError."""
    name, path = find(named)
    content = schema.read_yaml(path)
    known = schemas()
    for key, value in content.items():
        if key not in known and key not in TEXTS:
            raise schema.unknown_key(str(key), [*TEXTS, *known], str(path))
        wanted: type = str if key in TEXTS else dict
        if not isinstance(value or wanted(), wanted):
            raise UsageError(
                f"{path}: {key} is {value!r}, not {'text' if wanted is str else 'a mapping'}",
                hint="docs/recipes.md shows a whole recipe",
            )
    settings: dict[str, Any] = {}
    for stage, found in known.items():
        given = (flags or {}).get(stage, {})
        if stage in content:
            where = f"{path}: {stage}"
            settings[stage] = schema.resolve(found, content[stage] or {}, given, where, stage)
        elif given:
            raise UsageError(
                f"--{stage}.{next(iter(given))}: {path} has no section {stage}",
                hint="add the section, or leave the flag out",
            )
    name = content.get("name") or name
    return Recipe(name, content.get("description") or "", content.get("license") or "", settings)
