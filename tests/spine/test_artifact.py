"""Manifests, and writes that leave nothing half done."""

import dataclasses
from pathlib import Path

import pytest

from powerinfer_toolkit.artifact import Manifest, Origin, check_target, new_directory, new_file
from powerinfer_toolkit.errors import PiError

MANIFEST = Manifest(
    kind="model",
    origins={"weights": Origin("maker/model", "0123", "abcd"), "counts": Origin("counts.npy")},
    settings={"outtype": "f16", "layers": 3, "share": 0.5, "exact": True},
)


def test_manifest_survives_json():
    assert Manifest.from_json(MANIFEST.to_json(), where=Path("x")) == MANIFEST
    assert MANIFEST.to_json() == dataclasses.replace(MANIFEST).to_json()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"schema": 1}', '{"schema": 1, "origins": 3}']
)
def test_damaged_manifest(text):
    with pytest.raises(PiError, match="damaged manifest"):
        Manifest.from_json(text, where=Path("x"))


def test_unknown_schema():
    text = dataclasses.replace(MANIFEST, schema=99).to_json()
    with pytest.raises(PiError, match=r"x has manifest schema 99; this version knows 1") as failure:
        Manifest.from_json(text, where=Path("x"))
    assert "make it again" in failure.value.hint


def test_new_file_takes_the_place_at_the_end(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with new_file(path, force=True) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_new_file_vanishes_on_failure(tmp_path, failure):
    path = tmp_path / "a"
    path.write_text("old")

    def write():
        with new_file(path, force=True) as temporary:
            temporary.write_text("half")
            raise failure

    with pytest.raises(failure):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_targets(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PiError, match="exists already"):
        check_target(tmp_path / "file", force=False)
    check_target(tmp_path / "file", force=True)
    with pytest.raises(PiError, match="is a directory"):
        check_target(tmp_path, force=True)
    with pytest.raises(PiError, match="is not a directory"):
        check_target(tmp_path / "no" / "file", force=True)
    with pytest.raises(PiError, match="is not a directory"):
        check_target(tmp_path / "file" / "file", force=True)


def test_new_directory_stays_only_with_content(tmp_path):
    with new_directory(tmp_path / "empty"):
        pass
    with new_directory(tmp_path / "full") as path:
        (path / "file").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
