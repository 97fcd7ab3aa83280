"""What a user installs: one wheel for every Python 3 of a platform, with the library, without its sources."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "powerinfer_toolkit"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with the tools of this environment (no network), in its own build folder."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(folder), "--config-settings=build-dir=build/wheel"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cmake, ninja
    env = {**os.environ, "PATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_tag_is_for_every_python(wheel: Path) -> None:
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


@pytest.mark.parametrize(
    "name", ["runtime/lib/libpi.so", "py.typed", "recipes/__init__.py", "runtime/plan/__init__.py"]
)
def test_the_wheel_contains(name: str, names: list[str]) -> None:
    assert f"{PACKAGE}/{name}" in names


def test_recipes_are_complete(names: list[str]) -> None:
    expected = [
        f"{PACKAGE}/{path.relative_to(ROOT)}"
        for path in (ROOT / "recipes").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert expected
    assert set(expected) <= set(names)


def test_no_sources_no_tests(names: list[str]) -> None:
    suffixes = (".cpp", ".h", ".inl", ".map", ".cmake", ".txt", ".pyc")
    stray = [n for n in names if n.endswith(suffixes) and ".dist-info/" not in n]
    assert not stray
    assert not [name for name in names if "/tests/" in name or "/native/" in name]


def test_no_other_top_level_name(names: list[str]) -> None:
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {PACKAGE}
    assert len(top) == 2


def test_the_installed_library_loads(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        # An editable install answers before sys.path does.
        "import sys\n"
        "sys.meta_path = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
        "import powerinfer_toolkit.runtime.cli as cli\n"
        f"assert cli.__file__.startswith({str(tmp_path)!r}), cli.__file__\n"
        "sys.exit(cli.main(['--doctor']))"
    )
    env = {key: value for key, value in os.environ.items() if key not in ("PI_LIB", "LD_PRELOAD")}
    env |= {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
