"""Files of this toolkit in llama.cpp, and llama.cpp's word on the numpy reference."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from parity.closeness import log_softmax
from parity.llama_cpp_process import run_llama_cpp
from parity.reference import Reference
from parity.steps import random_tokens
from parity.synthetic import Shape, dense_layout, random_weights, write_gguf
from powerinfer_toolkit.convert.cli import main as pi_convert
from powerinfer_toolkit.runtime import Model

pytest.importorskip("xllamacpp")

SHAPE = Shape()
PROMPTS = [random_tokens(SHAPE.n_vocab, n, seed=n) for n in range(3, 60, 4)]


def assert_next_tokens(path: Path, last_logits: list[np.ndarray], tolerance: float) -> None:
    """llama.cpp's log-probabilities after each prompt are those of `last_logits`."""
    done = run_llama_cpp(path, PROMPTS)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    answered = [i for i, logprobs in enumerate(answers) if logprobs is not None]
    assert len(answered) >= 3
    for i in answered:
        np.testing.assert_allclose(answers[i], log_softmax(last_logits[i]), atol=tolerance)


def test_reference_equals_llama_cpp_in_float32(tmp_path):
    path = write_gguf(tmp_path / "dense.gguf", SHAPE, dense_layout(random_weights(SHAPE, 0)))
    reference = Reference.load(path)
    # float32 sums over n_embd and n_ff terms on one side: eps x sqrt(n) x depth, about 1e-5 at most
    assert_next_tokens(path, [reference.logits(prompt)[-1] for prompt in PROMPTS], 2e-5)


def convert_tiny(case: str, outtype: str, folder: Path) -> Path:
    from parity import checkpoints

    source = checkpoints.save_checkpoint(checkpoints.tiny_model(case), folder / "checkpoint")
    path = folder / "m.gguf"
    assert pi_convert([str(source), str(path), "--outtype", outtype]) == 0
    return path


# f32: float32 sums. The other types: llama.cpp rounds activations to float16 (2^-12 of each on average) or to
# int8 blocks (0.6% of a vector, see test_tensor_types), which moves logits of size 1 by about as much.
@pytest.mark.parametrize(("outtype", "tolerance"), [("f32", 2e-5), ("f16", 5e-3), ("q8_0", 6e-2)])
@pytest.mark.parametrize("case", ["gqa", "rope_linear", "rope_llama3"])
def test_converted_dense_files_run_in_llama_cpp(case, outtype, tolerance, tmp_path):
    """Tensors, keys and tokenizer as pi-convert writes them."""
    path = convert_tiny(case, outtype, tmp_path)
    with Model.load(path, threads=1, activation_type="f32") as model:
        assert_next_tokens(path, [model.logits(prompt)[-1] for prompt in PROMPTS], tolerance)


@pytest.mark.parametrize("outtype", ["f32", "f16", "q4_0"])  # extended, upstream, upstream
def test_llama_cpp_refuses_sparse_files(outtype, tmp_path):
    """It would run a ReLU model as SiLU: better not at all."""
    done = run_llama_cpp(convert_tiny("relu_blocks", outtype, tmp_path), PROMPTS)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "Failed to init server" in done.stderr
