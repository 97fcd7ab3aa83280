"""Manifests, and writes that leave nothing half done."""

import dataclasses
import resource
import signal
from pathlib import Path

import numpy as np
import pytest

from powerinfer_toolkit.artifact import (
    Manifest,
    Origin,
    check_target,
    new_directory,
    new_file,
    only_run,
    writing,
)
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


def test_a_second_run_in_a_directory_is_refused(tmp_path):
    folder = tmp_path / "a" / "out"
    with only_run(folder):
        with pytest.raises(PiError, match=r"another run is at work in .*out"), only_run(folder):
            pass
        with only_run(tmp_path / "other"):
            pass
    with only_run(folder):  # the lock ends with the run
        pass
    assert list(folder.iterdir()) == []


def test_other_processes_of_a_launch_pass(tmp_path, monkeypatch):
    with only_run(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with only_run(tmp_path):
            pass


def test_a_full_disk_by_way_of_other_libraries(tmp_path):
    """The text is that of safetensors; a real full disk is not to be had here."""
    said = "Error while serializing: I/O error: No space left on device (os error 28)"

    def write():
        with new_file(tmp_path / "a", force=False) as temporary:
            temporary.write_bytes(b"half")
            raise RuntimeError(said)

    with pytest.raises(PiError, match=r"cannot write .*No space left") as failure:
        write()
    assert "free space" in failure.value.hint
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), writing(tmp_path):
        raise KeyError("of another kind")


@pytest.mark.parametrize("library", ["safetensors", "tokenizers", "torch"])
def test_what_libraries_raise_at_a_file_too_large(library, tmp_path):
    module = pytest.importorskip(library)
    path = tmp_path / "file"

    def write():
        if library == "safetensors":
            from safetensors.numpy import save_file

            save_file({"a": np.zeros(1 << 16)}, path)
        elif library == "tokenizers":
            vocabulary = {str(i): i for i in range(1 << 12)}
            module.Tokenizer(module.models.BPE(vocabulary, [])).save(str(path))
        else:
            module.save(module.zeros(1 << 16), path)

    limits, action = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(PiError, match="cannot write"), writing(path):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, action)
