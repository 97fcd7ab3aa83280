"""Every shape and rope kind that pi-convert writes as a dense file runs in llama.cpp (about 3 s)."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import parity.reference
from parity.closeness import log_softmax
from parity.reference import Reference
from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.outtypes import OutType
from powerinfer_toolkit.convert.settings import ConvertSettings

pytest.importorskip("xllamacpp")

PEER = Path(parity.reference.__file__).with_name("llama_cpp.py")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "biases": {"attention_bias": True},
    "head_dim": {"head_dim": 32},
}


@pytest.mark.parametrize("case", CASES)
def test_dense_files_in_llama_cpp(checkpoint, tmp_path, case):
    output = tmp_path / "out.gguf"
    prepare(ConvertSettings(str(checkpoint(CASES[case]).path), output, OutType.F32)).write()
    prompts = np.random.default_rng(4).integers(0, 300, (30, 20)).tolist()
    done = subprocess.run(
        [sys.executable, str(PEER), str(output)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # The peer says nothing where the likeliest token is half a UTF-8 character.
    answers = [(p, a) for p, a in zip(prompts, json.loads(done.stdout), strict=True) if a]
    assert len(answers) >= 3
    reference = Reference.load(output)
    for prompt, answer in answers:
        # float32 sums of up to 96 terms through two layers on one side: eps x sqrt(n) x depth x |logit|,
        # 6e-8 x 10 x 10 x 5
        want = log_softmax(reference.logits(prompt)[-1])
        np.testing.assert_allclose(answer, want, atol=3e-5)
