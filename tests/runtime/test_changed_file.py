"""A model file that changes while it is mapped: an error, never a crash or silent nonsense."""

import os
import shutil

import pytest

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime import Model


@pytest.fixture
def own_copy(synthetic_gguf, tmp_path):
    return shutil.copy(synthetic_gguf(n_layers=4), tmp_path / "model.gguf")


def test_a_file_cut_short_is_reported_and_does_not_kill_the_process(own_copy):
    with Model.load(own_copy, threads=2) as model:
        before = model.logits([1, 2, 3])
        assert before.shape[0] == 3
        os.truncate(own_copy, os.path.getsize(own_copy) // 4)
        with pytest.raises(PiError, match="changed while it was in use"):
            model.logits([1, 2, 3])


def test_a_file_written_to_is_reported(own_copy):
    with Model.load(own_copy, threads=1) as model:
        with open(own_copy, "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\0")
        os.utime(own_copy, ns=(1, 1))
        with pytest.raises(PiError, match="changed while it was in use"):
            model.logits([1, 2, 3])
