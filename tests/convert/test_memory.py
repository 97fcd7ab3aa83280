"""One tensor in memory at a time: the peak does not follow the size of the checkpoint (about 4 s)."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

RUN = "import sys; from powerinfer_toolkit.convert.cli import main; sys.exit(main(sys.argv[1:]))"
LARGEST_BYTES = 2 * 2048 * 8192  # ffn_up in bfloat16


def peak_bytes(arguments):
    child = subprocess.Popen([sys.executable, "-c", RUN, "-q", *map(str, arguments)])
    _, status, usage = os.wait4(child.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return usage.ru_maxrss * 1024


@pytest.fixture
def sparse_checkpoint(checkpoint, tensor_shapes, tmp_path):
    """A ReLU model of 0.5 GB whose weights are a hole in the file, with counts."""
    source = checkpoint()
    config = source.config | {
        "hidden_act": "relu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
    }
    (source.path / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, shape in tensor_shapes(config).items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (source.path / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)
    assert offset > 12 * LARGEST_BYTES
    np.save(tmp_path / "counts.npy", np.random.default_rng(0).integers(1, 99, (4, 8192)))
    return source.path


def test_peak(sparse_checkpoint, tmp_path):
    command = [sparse_checkpoint, tmp_path / "out.gguf", "--activations", tmp_path / "counts.npy"]
    base = peak_bytes([*command, "--dry-run"])
    used = peak_bytes(command) - base
    # the source tensor, and a few arrays of 2^20 elements (4 MiB in float32) for a block on its way
    assert used < LARGEST_BYTES + 16 * (4 << 20)
