"""PWRI files as PowerInfer's converters write them, under its rule that every position is masked."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity.closeness import relative_l2
from parity.reference import Reference, Trace
from parity.steps import decode, run_chunks
from parity.upstream_file import PROMPT, UpstreamFile, write_upstream
from powerinfer_toolkit.runtime import Model

EVERYWHERE = np.ones(len(PROMPT), dtype=bool)
# F16: float32 sums over the file's own numbers; the KV cache rounds to float16 (2^-12 on average, 2.4e-4, of
# K and of V, over 12 layers of which attention gives about half the stream), about 1e-3 in all.
# Q4_0: activations round to int8 blocks of 32, a step of amax / 127, some 0.6% of a normal vector's norm
# before each of the products of 12 layers; errors add in squares to about 2e-2.
TOLERANCE = {Type.F16: 3e-3, Type.Q4_0: 5e-2}
# Logits keep this many standard deviations from the threshold, many times the error that these tolerances
# allow in a logit. So masks are the reference's, and a wrong mask anywhere would cost far more than they allow.
MARGIN = {Type.F16: 0.05, Type.Q4_0: 0.15}
FILES = {
    "f16": UpstreamFile(Type.F16, 1037, None, MARGIN[Type.F16]),
    "f16_small": UpstreamFile(Type.F16, 736, None, MARGIN[Type.F16]),
    "f16_threshold": UpstreamFile(Type.F16, 1037, 0.5, MARGIN[Type.F16]),
    "f16_all_pass": UpstreamFile(Type.F16, 1037, -100.0),
    "q4_0": UpstreamFile(Type.Q4_0, 1100, None, MARGIN[Type.Q4_0]),
    "q4_0_small": UpstreamFile(Type.Q4_0, 1000, None, MARGIN[Type.Q4_0]),
    "q4_0_all_pass": UpstreamFile(Type.Q4_0, 1100, -100.0),
}


@pytest.mark.parametrize("name", FILES)
def test_every_position_masked(name, tmp_path):
    spec = FILES[name]
    path = write_upstream(tmp_path / "model.powerinfer.gguf", spec)
    reference = Reference.load(path)
    trace = Trace()
    want = reference.logits(PROMPT, masked=EVERYWHERE, trace=trace)
    with Model.load(path, threads=2, predict_all=True) as model:
        assert relative_l2(model.logits(PROMPT), want) <= TOLERANCE[spec.type]
        assert relative_l2(decode(model, PROMPT), want) <= TOLERANCE[spec.type]
        assert relative_l2(in_chunks(model), want) <= TOLERANCE[spec.type]
        share = np.mean([margins >= 0 for margins in trace.margins])
        stats = model.stats()
        assert stats.neurons_guessed / stats.neurons_total == pytest.approx(share, abs=1e-9)
    if spec.threshold == -100.0:
        assert share == 1
    else:  # the test would see masks that are ignored, and a sink that is not masked
        assert relative_l2(reference.logits(PROMPT), want) > 10 * TOLERANCE[spec.type]
        later = EVERYWHERE & (np.arange(len(PROMPT)) > 0)
        assert relative_l2(reference.logits(PROMPT, masked=later), want) > 3 * TOLERANCE[spec.type]


def in_chunks(model: Model) -> np.ndarray:
    model.engine.kv_truncate(0, 0)
    return run_chunks(model, PROMPT, 5)


def test_long_prompts_are_masked_too(tmp_path):
    """Beyond the prediction tier as well; 40 random tokens at a threshold that nothing passes."""
    path = write_upstream(tmp_path / "m.gguf", UpstreamFile(Type.F16, 1037, 1e30))
    tokens = (PROMPT * 3)[:40]
    want = Reference.load(path).logits(tokens, masked=np.ones(40, dtype=bool))
    with Model.load(path, threads=2, predict_all=True) as model:
        assert relative_l2(model.logits(tokens), want) <= TOLERANCE[Type.F16]
        assert model.stats().neurons_guessed == 0


def test_without_predict_all_the_sink_is_exact(tmp_path):
    path = write_upstream(tmp_path / "m.gguf", FILES["f16_threshold"])
    # the margins hold for masks everywhere; the sink's change moves the others' logits, so look at it alone
    want = Reference.load(path).logits(PROMPT[:1])
    with Model.load(path, threads=1, ffn="predicted") as model:
        assert relative_l2(model.logits(PROMPT[:1]), want) <= TOLERANCE[Type.F16]
