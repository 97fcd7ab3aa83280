"""Files of this toolkit in llama.cpp, and llama.cpp's word on the numpy reference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from parity.closeness import log_softmax
from parity.reference import Reference
from parity.synthetic import Shape, dense_layout, random_weights, write_gguf

pytest.importorskip("xllamacpp")

SCRIPT = Path(__file__).with_name("llama_cpp.py")


def run_llama_cpp(path: Path, prompts: list[list[int]]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(path)]
    return subprocess.run(
        command, input=json.dumps(prompts), capture_output=True, text=True, check=False, timeout=120
    )


def answerable_prompts(path: Path) -> list[list[int]]:
    """Prompts after which a word is likeliest: the peer reports nothing for half a UTF-8 character."""
    reference = Reference.load(path)
    drawn = np.random.default_rng(4).integers(0, Shape().n_vocab, (40, 24)).tolist()
    return [p for p in drawn if reference.logits(p)[-1].argmax() >= Shape().n_vocab - 34]


def test_reference_equals_llama_cpp_in_float32(tmp_path):
    path = write_gguf(tmp_path / "dense.gguf", Shape(), dense_layout(random_weights(Shape(), 0)))
    prompts = answerable_prompts(path)
    assert len(prompts) >= 3
    done = run_llama_cpp(path, prompts)
    assert done.returncode == 0, done.stderr
    reference = Reference.load(path)
    for prompt, got in zip(prompts, json.loads(done.stdout), strict=True):
        # float32 sums over n_embd and n_ff terms on one side: eps x sqrt(n) x depth, about 1e-5 at most
        np.testing.assert_allclose(got, log_softmax(reference.logits(prompt)[-1]), atol=2e-5)
