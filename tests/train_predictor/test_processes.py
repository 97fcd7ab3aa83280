"""Two processes under accelerate end with what one process ends with (about 20 s)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from powerinfer_toolkit.statistics import ActivationStatistics

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "two_processes.py"
LAUNCH = ["-m", "torch.distributed.run", "--standalone"]


def run(folder, checkpoint, *, n_processes):
    """Each step of the predictors sees the same 16 blocks, in one process or half of them in each of two."""
    launch = [*LAUNCH, "--nproc_per_node", str(n_processes)] if n_processes > 1 else []
    sizes = [str(16 // n_processes), str(1024 // n_processes)]
    command = [sys.executable, *launch, str(SCRIPT), str(checkpoint), str(folder), *sizes]
    env = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folders(sparse_checkpoint, tmp_path_factory):
    made = []
    for n_processes in (1, 2):
        folder = tmp_path_factory.mktemp(f"processes_{n_processes}")
        run(folder, sparse_checkpoint, n_processes=n_processes)
        made.append(folder)
    return made


def test_shards_merge_into_the_same_integers(folders):
    one, two = (
        ActivationStatistics.load(folder / "statistics").tally.arrays() for folder in folders
    )
    for name, array in one.items():
        # blocks come in other batches, whose products round differently: a gate within 1e-6 of 0 may flip
        assert np.abs(array - two[name]).sum() <= (0 if name in ("tokens", "windows") else 12), name


def test_averaged_gradients_train_the_same_predictors(folders):
    """Gradients are the same sums in another order, which Adam's 9 steps do not blow up beyond 1e-3."""
    reports = [
        json.loads((folder / "predictors" / "report.json").read_text()) for folder in folders
    ]
    losses = [np.array([loss for _, loss in report["losses"][0][1]]) for report in reports]
    assert len(losses[0]) > 5
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    bytes_read = [report["targets"][0]["overall"]["bytes"] for report in reports]
    assert bytes_read[1] == pytest.approx(bytes_read[0], rel=0.01)
    first = [load_file(folder / "predictors" / "model_0.safetensors") for folder in folders]
    assert np.corrcoef(first[0]["fc1.weight"].ravel(), first[1]["fc1.weight"].ravel())[0, 1] > 0.999
