"""One tensor in memory at a time: the peak does not follow the size of the checkpoint (about 6 s)."""

import re
import subprocess
import sys

import numpy as np
import pytest

# The child says its own peak: what wait4 says of it begins with what its parent had in memory.
RUN = """
import sys
from powerinfer_toolkit.convert.cli import main
assert main(sys.argv[1:]) == 0
print(open("/proc/self/status").read())
"""
LARGEST_BYTES = 2 * 2048 * 8192  # ffn_up in bfloat16


def peak_bytes(arguments):
    command = [sys.executable, "-c", RUN, "-q", *map(str, arguments)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"VmHWM:\s+(\d+) kB", said)[1]) * 1024


@pytest.fixture
def source(hollow_checkpoint, tmp_path):
    """A ReLU model of 0.3 GB, with counts."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2}
    np.save(tmp_path / "counts.npy", np.random.default_rng(0).integers(1, 99, (2, 8192)))
    folder = hollow_checkpoint({"hidden_act": "relu"} | sizes)
    assert (folder / "model.safetensors").stat().st_size > 6 * LARGEST_BYTES
    return folder


# the source tensor, and a few arrays of 2^20 elements (4 MiB in float32) for a block on its way
BLOCKS_BYTES = 16 * (4 << 20)


def test_peak(source, tmp_path):
    command = [source, tmp_path / "out.gguf", "--activations", tmp_path / "counts.npy"]
    base = peak_bytes([*command, "--dry-run"])
    assert peak_bytes(command) - base < LARGEST_BYTES + BLOCKS_BYTES


def test_peak_from_a_model_file(source, tmp_path):
    """Rows stay packed until they are needed; only a transposed down is whole in float32 for a while."""
    model, output = tmp_path / "q8_0.gguf", tmp_path / "out.gguf"
    peak_bytes([source, model, "--outtype", "q8_0"])
    command = [model, output, "--outtype", "q4_0", "--activations", tmp_path / "counts.npy"]
    base = peak_bytes([*command, "--dry-run"])
    assert peak_bytes(command) - base < LARGEST_BYTES + BLOCKS_BYTES
