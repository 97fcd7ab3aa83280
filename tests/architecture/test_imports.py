"""Who may import whom, read from the source with ast: lazy imports inside functions count too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "powerinfer_toolkit"
STAGES = ("convert", "profile_activations", "train_predictor", "runtime", "recipes")
SPINE = ROOT / "src" / PACKAGE
TRAINING_ONLY = {"torch", "transformers", "datasets", "peft", "accelerate"}


def imported_modules(source: str) -> Iterator[tuple[int, str]]:
    """Yield (relative level, dotted module) of every import; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.level, ".".join(filter(None, (node.module, alias.name)))


def stage_of(module: str) -> str | None:
    """Return the stage that a module belongs to, None for the spine and everything foreign."""
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 and parts[1] in STAGES else None


def files_of(part: str) -> list[Path]:
    """Return the Python files of a stage, of the spine, or of what training stages share."""
    if part == "spine":
        return sorted(SPINE.glob("*.py"))
    folder = SPINE / part if part == "training" else ROOT / part
    return sorted(folder.rglob("*.py"))


def offences(part: str, source: str) -> list[str]:
    """Return the imports in a file of `part` that the rules forbid."""
    found = []
    for level, module in imported_modules(source):
        stage = stage_of(module)
        if level:
            found.append(f"relative import of {module}")
        if module.split(".")[0] in STAGES:
            found.append(f"{module} is reachable only from the repository's root")
        if stage not in (None, part) and part != "recipes":
            found.append(f"{part} imports the stage {stage}")
        if part in ("runtime", "spine") and module.startswith(f"{PACKAGE}.training."):
            found.append(f"{part} imports {module}, which needs torch")
        if part in ("runtime", "spine") and module.split(".")[0] in TRAINING_ONLY:
            found.append(f"{part} imports {module}")
    return found


@pytest.mark.parametrize("part", ["spine", "training", *STAGES])
def test_imports_follow_the_rules(part: str) -> None:
    paths = files_of(part)
    assert paths, f"no file of {part} was found"
    bad = [f"{path}: {why}" for path in paths for why in offences(part, path.read_text())]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("convert", "from powerinfer_toolkit.runtime.model import Model"),
        ("convert", "def f():\n    import powerinfer_toolkit.runtime"),
        ("convert", "from powerinfer_toolkit import runtime"),
        ("spine", "import powerinfer_toolkit.convert.cli"),
        ("spine", "from powerinfer_toolkit.training import blocks"),
        ("training", "import powerinfer_toolkit.convert.cli"),
        ("runtime", "from torch import nn"),
        ("runtime", "from . import model"),
        ("runtime", "import runtime.model"),
    ],
)
def test_forbidden_imports_are_seen(part: str, line: str) -> None:
    assert offences(part, line)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("recipes", "from powerinfer_toolkit.runtime import Model"),
        ("runtime", "from powerinfer_toolkit.runtime.model import Model"),
        ("convert", "from powerinfer_toolkit import console\nimport torch"),
    ],
)
def test_permitted_imports_pass(part: str, line: str) -> None:
    assert not offences(part, line)
