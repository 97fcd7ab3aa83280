"""The base install has no torch: every base module imports, and the commands start, where it is refused."""

import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "powerinfer_toolkit"
BASE_STAGES = ("convert", "runtime", "recipes")
# What the extras `train` and `eval` are for; only the command lines start without them.
EXTRAS = tuple(PACKAGE / name for name in ("convert/relufy", "recipes/verify", "recipes/evaluate"))
EXTRAS_BASE = {"__init__.py", "__main__.py", "cli.py", "settings.py", "report.py"}
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
START_UP_SECONDS = 0.3

REFUSED = ("torch", "transformers", "datasets", "peft", "accelerate", "sentencepiece", "lm_eval")
REFUSE = f"""
import sys
REFUSED = {REFUSED}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ImportError("the base install has no " + name)
sys.meta_path.insert(0, Refuse())
"""


def base_modules() -> list[str]:
    """Return the dotted names of the spine's and the base stages' modules."""
    paths = list(PACKAGE.glob("*.py"))
    for stage in BASE_STAGES:
        paths += (PACKAGE / stage).rglob("*.py")
    paths = [
        path
        for path in paths
        if path.name in EXTRAS_BASE or not any(folder in path.parents for folder in EXTRAS)
    ]
    names = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in paths]
    return sorted(".".join(name) for name in names if all(part.isidentifier() for part in name))


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


def start_command(script: str, flag: str) -> str:
    """Return the code that starts a command as its console script does."""
    module, function = SCRIPTS[script].split(":")
    return f"import sys; from {module} import {function}; sys.exit({function}([{flag!r}]))"


def test_base_modules_import_without_torch() -> None:
    modules = base_modules()
    assert {"powerinfer_toolkit.errors", "powerinfer_toolkit.convert.__init__"} <= set(modules)
    names = [module.removesuffix(".__init__") for module in modules]
    done = python(REFUSE + "import importlib\n" + f"for m in {names}: importlib.import_module(m)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_commands_start_without_torch(script: str) -> None:
    done = python(REFUSE + start_command(script, "--help"))
    assert done.returncode == 0, done.stderr
    assert script in done.stdout


def test_the_hook_refuses_torch() -> None:
    done = python(REFUSE + "import torch.nn")
    assert "the base install has no torch" in done.stderr


@pytest.mark.resources
@pytest.mark.parametrize("script", SCRIPTS)
def test_commands_start_fast(script: str) -> None:
    code = start_command(script, "--help")
    best = min(seconds_of(code) for _ in range(5))
    assert best < START_UP_SECONDS, f"{script} --help took {best:.2f} s at best"


def seconds_of(code: str) -> float:
    start = time.perf_counter()
    assert python(code).returncode == 0
    return time.perf_counter() - start
