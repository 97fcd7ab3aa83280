"""The recipes that come with the package: recipes/<model>/<variant>.yaml, named <model>/<variant>."""

from __future__ import annotations

import difflib
from pathlib import Path

from powerinfer_toolkit.errors import UsageError

FOLDER = Path(__file__).parent
NO_RECIPES = "accelerate_configs"


def shipped() -> dict[str, Path]:
    """Return the files of all shipped recipes by name."""
    paths = sorted(path for path in FOLDER.glob("*/*.yaml") if path.parent.name != NO_RECIPES)
    return {f"{path.parent.name}/{path.stem}": path for path in paths}


def find(named: str) -> tuple[str, Path]:
    """Return name and file of a recipe: a file, a shipped name, or a model that has one recipe only.

    The name of a file is its stem. Raises UsageError, which suggests the nearest name.
    """
    path = Path(named)
    if path.is_file():
        return path.stem, path
    names = shipped()
    variants = [name for name in names if name.split("/")[0] == named]
    if named in names or len(variants) == 1:
        name = named if named in names else variants[0]
        return name, names[name]
    if variants:
        raise UsageError(
            f"there are several recipes for {named}", hint=f"name one: {', '.join(variants)}"
        )
    models = {name.split("/")[0] for name in names}
    near = difflib.get_close_matches(named, [*names, *models], n=1)
    hint = f"did you mean {near[0]}?" if near else "pi-recipe ls lists the names"
    raise UsageError(f"there is no recipe and no file {named}", hint=hint)
