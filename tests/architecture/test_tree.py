"""The shape of the source tree in git: five symbolic links, no stray names."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = {"convert", "profile_activations", "train_predictor", "runtime", "recipes"}
MAX_TRACKED_BYTES = 500_000


def git(*arguments: str) -> str:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_stages_are_five_symbolic_links() -> None:
    rows = git("ls-files", "-s", "src/powerinfer_toolkit").splitlines()
    links = {row.split("\t")[1].rsplit("/", 1)[1] for row in rows if row.startswith("120000 ")}
    assert links == LINKS
    for name in links:
        path = ROOT / "src" / "powerinfer_toolkit" / name
        assert path.readlink() == Path("../..") / name
        assert (path / "__init__.py").is_file()


def test_the_package_is_marked_typed() -> None:
    assert (ROOT / "src" / "powerinfer_toolkit" / "py.typed").is_file()


def test_tracked_files_are_small() -> None:
    names = git("ls-files", "-z").split("\0")
    paths = [ROOT / name for name in names if name and (ROOT / name).is_file()]
    assert paths
    large = [str(path) for path in paths if path.stat().st_size > MAX_TRACKED_BYTES]
    assert not large
