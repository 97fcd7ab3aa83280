"""The stages of a run: what each is made from, the call of its function, and where its files lie."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from powerinfer_toolkit.artifact import Manifest, Origin
from powerinfer_toolkit.convert.relufy.settings import FREE_KEYS
from powerinfer_toolkit.fingerprint import weights_sha256
from powerinfer_toolkit.recipes.checks import sources
from powerinfer_toolkit.recipes.progress import Progress
from powerinfer_toolkit.recipes.recipe import Recipe
from powerinfer_toolkit.settings import to_mapping
from powerinfer_toolkit.training.sources import DataSource

KIND = "recipe_stage"
FREE = FREE_KEYS | {"save_steps", "token_dir", "threads"}  # settings that change no file
CARD, RECIPE = "README.md", "recipe.yaml"  # beside the model


@dataclass(frozen=True)
class Run:
    """A recipe in its directory; `settings` by stage are the recipe's, with paths of this run."""

    recipe: Recipe
    output_dir: Path
    settings: dict[str, Any]

    @classmethod
    def of(cls, recipe: Recipe, output_dir: Path) -> Run:
        """Put every stage's files below `output_dir`; texts are tokenised once for all."""
        settings = recipe.at(output_dir)
        for stage in settings:
            changes: dict[str, Any] = {}
            if hasattr(settings[stage], "token_dir"):
                changes["token_dir"] = settings[stage].token_dir or str(output_dir / "tokens")
            if stage == "relufy":
                changes["output_dir"] = str(output_dir / "relufy")
            settings[stage] = dataclasses.replace(settings[stage], **changes)
        return cls(recipe, output_dir, settings)

    @property
    def source(self) -> str:
        """The dense model; of the hub, once it was trained on, at the revision that was."""
        named: str = self.settings["relufy"].model_name_or_path
        path = self.checkpoint / "manifest.json"
        if not path.is_file():
            return named
        origin = Manifest.from_json(path.read_text(encoding="utf-8"), where=path).origins["model"]
        return f"{origin.name}@{origin.revision}" if origin.revision else named

    @property
    def checkpoint(self) -> Path:
        """The sparse model in Hugging Face's form."""
        return self.output_dir / "relufy"

    @property
    def statistics(self) -> Path:
        """The directory of the activation counts."""
        return self.output_dir / "statistics"

    @property
    def predictors(self) -> Path | None:
        """The directory of the predictors, None where the recipe has none."""
        return self.output_dir / "predictors" if "train_predictor" in self.settings else None

    @property
    def model(self) -> Path:
        """The sparse model file; the card lies beside it."""
        name = f"{self.recipe.file_stem}-{self.settings['convert'].outtype}.gguf"
        return self.output_dir / "model" / name

    @property
    def dense(self) -> Path:
        """The dense model as a file, for comparison."""
        return self.output_dir / "dense" / f"dense-{self.settings['convert'].outtype}.gguf"

    @property
    def report(self) -> Path:
        """What verification measured."""
        return self.output_dir / "verify" / "report.json"


@dataclass(frozen=True)
class Stage:
    """One stage: its call, the folders that it writes (below the run's) and the stages that it reads.

    A stage that is not `distributed` runs on the main process of a launch alone.
    """

    call: Callable[[Run], None]
    folders: tuple[str, ...]
    reads: tuple[str, ...]
    distributed: bool = False

    def files(self, run: Run) -> Iterator[Path]:
        """Yield what the stage has written; what an interruption left behind has a hidden name."""
        for folder in self.folders:
            for path in sorted((run.output_dir / folder).rglob("*")):
                visible = path.name[0] != "." and path.name not in (CARD, RECIPE)
                if path.is_file() and visible:
                    yield path


def _synthetic(run: Run) -> None:
    from powerinfer_toolkit.recipes.synthetic import make

    make(run.settings["synthetic"], run.output_dir / "synthetic")


def _relufy(run: Run) -> None:
    from powerinfer_toolkit.convert.relufy.run import relufy
    from powerinfer_toolkit.recipes.packing import check_source

    if "convert" in run.settings:
        check_source(run)
    relufy(run.settings["relufy"])


def _profile(run: Run) -> None:
    from powerinfer_toolkit.profile_activations.profile import profile

    profile(str(run.checkpoint), run.statistics, run.settings["profile"])


def _train_predictor(run: Run) -> None:
    from powerinfer_toolkit.statistics import ActivationStatistics
    from powerinfer_toolkit.train_predictor.train import train_predictors

    assert run.predictors is not None
    statistics = ActivationStatistics.load(run.statistics)
    train_predictors(
        str(run.checkpoint), statistics, run.predictors, run.settings["train_predictor"]
    )


def _convert(run: Run) -> None:
    from powerinfer_toolkit.recipes.packing import pack

    pack(run)


def _verify(run: Run) -> None:
    from powerinfer_toolkit.recipes.measure import measure

    measure(run)


STAGES = {
    "synthetic": Stage(_synthetic, ("synthetic",), ()),
    "relufy": Stage(_relufy, ("relufy",), ("synthetic",), distributed=True),
    "profile": Stage(_profile, ("statistics",), ("relufy",), distributed=True),
    "train_predictor": Stage(
        _train_predictor, ("predictors",), ("relufy", "profile"), distributed=True
    ),
    "convert": Stage(_convert, ("dense", "model"), ("relufy", "profile", "train_predictor")),
    "verify": Stage(_verify, ("verify",), ("relufy", "train_predictor", "convert")),
}


def manifest(run: Run, stage: str, progress: Progress) -> Manifest:
    """Return what a stage is made from: the outputs of stages before, model and texts; and its settings."""
    origins = {}
    for before in STAGES[stage].reads:
        record = progress.load(before)
        if record is not None:
            origins[before] = Origin(before, sha256=record.fingerprint())
    if stage in ("relufy", "convert"):
        origins["model"] = _model_origin(run.settings["relufy"].model_name_or_path)
    for number, source in enumerate(sources(run.settings[stage])):
        origins[f"text_{number}"] = _text_origin(source)
    kept = {
        key: value if isinstance(value, (str, int, float, bool)) else json.dumps(value)
        for key, value in to_mapping(run.recipe.settings[stage]).items()
        if key not in FREE
    }
    if stage == "convert":
        kept["name"] = run.recipe.name  # its files are called so
    return Manifest(KIND, origins, kept)


@cache
def _model_origin(named: str) -> Origin:
    """Return what a model is called, and the hash of a local one; of a hub's model the name has the revision."""
    path = Path(named)
    if not path.is_dir():
        name, _, revision = named.partition("@")
        return Origin(name, revision)
    return Origin(path.resolve().name, sha256=weights_sha256(path))


def _text_origin(source: DataSource) -> Origin:
    """Return a source's name and how many files and bytes it has, as which tokenised texts are known too."""
    if source.id:
        return Origin(source.id)
    from powerinfer_toolkit.training.documents import local_files

    files = local_files(source)
    n_bytes = sum(path.stat().st_size for path in files)
    return Origin(Path(source.path).name, revision=f"{len(files)} files, {n_bytes} bytes")
