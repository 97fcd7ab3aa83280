"""A recipe from its first stage to the card, stage by stage; what is finished is skipped."""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from powerinfer_toolkit import console
from powerinfer_toolkit.artifact import new_file, only_run
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.recipes import card
from powerinfer_toolkit.recipes.checks import check, missing_models, missing_packages, missing_texts
from powerinfer_toolkit.recipes.progress import Progress
from powerinfer_toolkit.recipes.recipe import Recipe
from powerinfer_toolkit.recipes.results import Results, collect
from powerinfer_toolkit.recipes.stages import CARD, RECIPE, STAGES, Run, manifest
from powerinfer_toolkit.recipes.verify import check_device
from powerinfer_toolkit.runtime import native_lib


def run_recipe(recipe: Recipe, output_dir: Path, *, restart: str | None = None) -> Results | None:
    """Run what is not finished yet of a recipe, in `output_dir`, and return what it has to show.

    The same call continues an interrupted run. `restart` names a stage to make anew with all that follow. Under
    accelerate launch every process trains, and the main one does the rest; the others, and a recipe without
    the stage verify, return None. Raises PiError, UsageError for settings or inputs that have changed.
    """
    check(recipe)
    _check_inputs(recipe)
    with only_run(output_dir):
        return _run_stages(recipe, output_dir, restart)


def _run_stages(recipe: Recipe, output_dir: Path, restart: str | None) -> Results | None:
    run, progress = Run.of(recipe, output_dir), Progress(output_dir)
    if _is_main():
        progress.open()
        if restart is not None:
            _forget(run, progress, restart)
    for stage in recipe.settings:
        together = any(STAGES[name].distributed for name in _from(recipe, stage))
        if together or _is_main():
            _run_stage(run, progress, stage, _wait if together else lambda: None)
    if not _is_main() or "verify" not in recipe.settings:
        return None
    results = collect(run)
    _write(run.model.parent / RECIPE, recipe.to_yaml())
    _write(run.model.parent / CARD, card.to_text(run, results))
    console.info(f"next: pi-run -m {shlex.quote(str(run.model))}")
    return results


def _check_inputs(recipe: Recipe) -> None:
    """Refuse a run that lacks model, texts, packages or the engine, before the first stage takes hours."""
    missing = [*missing_models(recipe.settings), *missing_texts(recipe.settings)]
    if missing:
        raise PiError(
            f"there is nothing at {', '.join(missing)}",
            hint="the head of the recipe says how to make it; pi-recipe show prints the recipe",
        )
    packages = missing_packages(recipe.settings)
    if packages:
        raise PiError(
            f"{recipe.name} needs {', '.join(packages)}",
            hint="pip install 'powerinfer-toolkit[train]'",
        )
    if "verify" in recipe.settings:
        native_lib.load()
        check_device(recipe.settings["verify"].device)


def _from(recipe: Recipe, stage: str) -> list[str]:
    """Return a stage of the recipe and all that follow."""
    names = list(recipe.settings)
    return names[names.index(stage) :]


def _forget(run: Run, progress: Progress, stage: str) -> None:
    if stage not in run.recipe.settings:
        raise UsageError(
            f"the recipe has no stage {stage}", hint=f"stages: {', '.join(run.recipe.settings)}"
        )
    names = _from(run.recipe, stage)
    folders = [run.output_dir / folder for name in names for folder in STAGES[name].folders]
    if "convert" in run.settings:
        (run.model.parent / CARD).unlink(missing_ok=True)
    progress.forget(names, folders)


def _run_stage(run: Run, progress: Progress, stage: str, wait: Callable[[], None]) -> None:
    """Run one stage unless it is finished; the main process decides, and keeps the record."""
    if _is_main():
        progress.begin(stage, manifest(run, stage, progress))
    wait()
    finished = progress.is_finished(stage)
    wait()  # nobody is to read a record that the fastest has finished
    if finished:
        console.info(f"{stage} is finished already")
        return
    console.info(f"---- {stage}")
    start = time.perf_counter()
    if STAGES[stage].distributed or _is_main():
        STAGES[stage].call(run)
        _free_memory()
    wait()
    if _is_main():
        progress.finish(stage, STAGES[stage].files(run))
        console.info(f"{stage}: {time.perf_counter() - start:.1f} s")
    wait()


def _is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _wait() -> None:
    """Wait for the other processes of a launch."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available()).wait_for_everyone()


def _free_memory() -> None:
    """Give back what a stage held on the device."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _write(path: Path, text: str) -> None:
    with new_file(path, force=True) as temporary:
        temporary.write_text(text, encoding="utf-8")


def copy(source: Path, target: Path) -> None:
    """Copy a recipe for editing. Raises PiError where the target exists."""
    if target.exists():
        raise PiError(f"{target} exists already", hint="name a new file")
    with new_file(target, force=False) as temporary:
        shutil.copyfile(source, temporary)
