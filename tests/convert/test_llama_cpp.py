"""Every shape and rope kind that pi-convert writes as a dense file runs in llama.cpp (about 8 s)."""

import json
from pathlib import Path

import numpy as np
import pytest

from parity.closeness import log_softmax, relative_l2
from parity.llama_cpp_process import run_llama_cpp
from parity.reference import Reference
from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.outtypes import OutType
from powerinfer_toolkit.convert.settings import ConvertSettings

pytest.importorskip("xllamacpp")

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


def next_logprobs(model: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Prompts with llama.cpp's log-probabilities after them, where it says any.

    It says nothing where the likeliest token is half a UTF-8 character.
    """
    done = run_llama_cpp(model, prompts)
    assert done.returncode == 0, done.stderr
    answers = [(p, a) for p, a in zip(prompts, json.loads(done.stdout), strict=True) if a]
    assert len(answers) >= 3
    return answers


PROMPTS = np.random.default_rng(4).integers(0, 300, (30, 20)).tolist()


@pytest.mark.parametrize("case", CASES)
def test_dense_files_in_llama_cpp(checkpoint, tmp_path, case):
    output = tmp_path / "out.gguf"
    prepare(ConvertSettings(str(checkpoint(CASES[case]).path), output, OutType.F32)).write()
    reference = Reference.load(output)
    for prompt, answer in next_logprobs(output, PROMPTS):
        # float32 sums of up to 96 terms through two layers on one side: eps x sqrt(n) x depth x |logit|,
        # 6e-8 x 10 x 10 x 5
        want = log_softmax(reference.logits(prompt)[-1])
        np.testing.assert_allclose(answer, want, atol=3e-5)


@pytest.mark.parametrize("outtype", ["q4_k_m", "q3_k_m", "q2_k", "q6_k", "q5_k", "iq4_nl", "q5_0"])
def test_quantised_files_in_llama_cpp(checkpoint, write_tensors, tmp_path, outtype):
    """Mixtures too: the peer reads every type as gguf-py does, from which the reference has its weights."""
    output = tmp_path / "out.gguf"
    source = checkpoint({"hidden_size": 256, "intermediate_size": 512})
    for name, values in source.tensors.items():
        if "q_proj" in name:  # attention that hangs on one position would blow up every rounding
            values *= 0.125
    write_tensors(source.path / "model.safetensors", source.tensors)
    prepare(ConvertSettings(str(source.path), output, OutType(outtype))).write()
    reference = Reference.load(output)
    # It rounds the input of every product to int8 in blocks of 32 or 256: a step of peak / 127, where the peak of
    # 256 normal numbers is about 2.8 deviations, so 2.8 / 127 / sqrt(12) = 0.64%. Seven products in each of two
    # layers and the head: sqrt(15) x 0.64% = 2.5% of the logits if they add up at random.
    answers = next_logprobs(output, PROMPTS)
    want = np.stack([reference.logits(prompt)[-1] for prompt, _ in answers])
    got = np.stack([answer for _, answer in answers])
    got, want = (x - x.mean(axis=1, keepdims=True) for x in (got, want))  # softmax lets shifts free
    assert relative_l2(got, want) < 4e-2
