"""What can be known of a recipe without weights, network or torch: settings, contradictions, texts that exist."""

from __future__ import annotations

import dataclasses
import glob
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from powerinfer_toolkit.convert.dialect import UPSTREAM_TYPES
from powerinfer_toolkit.convert.relufy import settings as relufy
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.recipes.recipe import OUTPUT_DIR, Recipe
from powerinfer_toolkit.training.sources import DataSource

NEEDS = {
    "profile": "relufy",
    "train_predictor": "profile",
    "convert": "profile",
    "verify": "convert",
}
# Texts have to be split alike in all stages: else one trains on what another measures on.
SPLIT_KEYS = ("eval_mixture", "held_out_share", "separator_token")
LATER_STAGES = ("profile", "train_predictor", "verify")


def check(recipe: Recipe) -> None:
    """Refuse settings that are wrong in themselves or contradict each other. Raises UsageError."""
    found = recipe.settings
    if "relufy" not in found:
        raise UsageError(f"{recipe.name} has no section relufy", hint="a recipe begins with it")
    for stage, needed in NEEDS.items():
        if stage in found and needed not in found:
            raise UsageError(
                f"{recipe.name}: {stage} needs the section {needed}",
                hint="add it, or leave this stage out",
            )
    relufy.check(dataclasses.replace(found["relufy"], output_dir=OUTPUT_DIR))
    if "verify" in found and found["verify"].predictors is not None:
        raise UsageError("verify.predictors are those of the run", hint="leave it out")
    _check_variant(found)
    _check_split(found)


def _check_variant(found: dict[str, Any]) -> None:
    variant = found["relufy"].variant
    if variant == relufy.Variant.DENSE and len(found) > 1:
        raise UsageError(
            "relufy.variant is dense: no neuron of it is ever off",
            hint="a control needs no recipe: pi-relufy RECIPE.yaml --variant dense",
        )
    convert = found.get("convert")
    if variant == relufy.Variant.DRELU:
        for stage in ("profile", "train_predictor"):
            if stage in found and not found[stage].trust_remote_code:
                raise UsageError(
                    f"{stage}.trust_remote_code is false, but dReLU has its code in the checkpoint",
                    hint="trust_remote_code: true, after reading modeling_*.py of the checkpoint",
                )
        if convert is not None:
            raise UsageError(
                "there is no file format for dReLU yet", hint="leave out convert and verify"
            )
    if convert is None or convert.dialect != "upstream":
        return
    if variant == relufy.Variant.FATRELU:
        raise UsageError("PowerInfer knows no threshold of fatrelu", hint="dialect: extended")
    right = sorted(member.name.lower() for member in UPSTREAM_TYPES)
    if convert.outtype not in right:
        raise UsageError(
            f"PowerInfer computes {convert.outtype} wrongly",
            hint=f"outtype {' or '.join(right)}, or dialect: extended",
        )


def _check_split(found: dict[str, Any]) -> None:
    first = found["relufy"]
    for stage in LATER_STAGES:
        if stage not in found or getattr(found[stage], "file", None):
            continue
        for key in SPLIT_KEYS:
            ours, theirs = getattr(found[stage], key), getattr(first, key)
            unused = key == "held_out_share" and first.eval_mixture
            if ours != theirs and not unused:
                raise UsageError(
                    f"{stage}.{key} is {_plain(ours)}, relufy.{key} is {_plain(theirs)}",
                    hint="a document that one holds out, the other would train on",
                )


def _plain(value: Any) -> Any:  # noqa: ANN401 - a setting
    return [source.name for source in value] if isinstance(value, list) else value


def sources(settings: Any) -> Iterator[DataSource]:  # noqa: ANN401 - of any stage
    """Yield the sources of text that a stage names."""
    for key in ("dataset_mixture", "eval_mixture"):
        yield from getattr(settings, key, [])
    if getattr(settings, "file", None):
        yield DataSource(path=settings.file)


def missing_texts(settings: dict[str, Any]) -> list[str]:
    """Return the local texts that are not there; those that the run itself makes do not count."""
    named = {source.path for values in settings.values() for source in sources(values)}
    paths = sorted(path for path in named if path and OUTPUT_DIR not in path)
    return [
        path for path in paths if not Path(path).is_file() and not glob.glob(path, recursive=True)
    ]


def missing_models(settings: dict[str, Any]) -> list[str]:
    """Return the models that are named by a path where nothing lies; those of the hub do not count."""
    named = (settings["relufy"].model_name_or_path, settings["relufy"].teacher_model_name_or_path)
    local = [name for name in named if name and OUTPUT_DIR not in name]
    paths = [name for name in local if name[0] in "./" or name.count("/") > 1]
    return [path for path in paths if not Path(path).is_dir()]


def missing_packages(settings: dict[str, Any]) -> list[str]:
    """Return what the training of these settings needs beside torch and transformers, and is not installed."""
    needed = {"peft"} if settings["relufy"].use_peft else set()
    if any(source.id for values in settings.values() for source in sources(values)):
        needed.add("datasets")
    return sorted(name for name in needed if importlib.util.find_spec(name) is None)
