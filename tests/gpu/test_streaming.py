"""Large steps whose cold neurons' weights pass through the device, against the float64 reference and the CPU (about 20 s).

Nothing is handed over in such a step, so float32 files differ from float64 by the rounding of float32 sums alone
(ROUNDING); other types as on a whole GPU (MANY_TOKENS). Pieces are so small that a layer takes several.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from gpu.hybrid import SMALL, clear_text, dense_file, opened, options, small_file, split_plan
from gpu.models import Synth
from gpu.test_hybrid import HANDED, ROUNDING, SPLITS
from gpu.test_model import MANY_TOKENS
from parity.closeness import relative_l2
from parity.reference import Reference
from parity.steps import run_chunks
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.runtime.engine import Batch, FfnRule
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.model_file import ModelFile

pytestmark = pytest.mark.usefixtures("device_library")

FROM = 17
# 32 neurons of a float32 file take 3 x 32 x 96 x 4 = 36 KiB: pieces of 64 neurons, then what is left of them.
STREAMED: dict[str, Any] = {"stream_tokens": FROM, "stream_piece_bytes": 80 * 1024}
KINDS = ("nothing on the GPU", "half", "pulled", "three kinds of layers", "nothing on the CPU")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_file(tmp_path_factory.mktemp("streaming") / "small.gguf")


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ffn", ["exact", "dense"])
def test_prompts(path: Path, name: str, ffn: str) -> None:
    """Two large steps, one after the other, then one token, for which the CPU is asked again."""
    tokens, want = clear_text(path, np.zeros(35, dtype=bool))
    with opened(path, options(ffn), SPLITS[name], **STREAMED) as model:
        found = run_chunks(model, tokens[:34], 17)
        np.testing.assert_allclose(found, want[:34], atol=ROUNDING)
        np.testing.assert_allclose(run_chunks(model, tokens[34:], 1), want[34:], atol=HANDED)


@pytest.mark.parametrize("name", KINDS)
def test_masks_of_every_token(path: Path, name: str) -> None:
    """Runs of masked tokens, of more and of fewer than the device takes one by one."""
    mask = np.arange(26) >= 4
    mask[[22, 24]] = False
    tokens, want = clear_text(path, mask)
    rules = np.where(mask, FfnRule.PREDICT, FfnRule.EXACT)
    with opened(path, options("predicted"), SPLITS[name], **STREAMED) as model:
        model.engine.run(Batch(tokens, ffn_rules=rules, want_logits=True))
        np.testing.assert_allclose(model.engine.logits(), want, atol=ROUNDING)


@pytest.mark.parametrize("name", ["half", "pulled"])
@pytest.mark.parametrize("down", [Type.F32, Type.Q8_0])
def test_a_plain_layout(tmp_path: Path, name: str, down: Type) -> None:
    """Pieces of ffn_down are columns."""
    path = dense_file(tmp_path / "dense.gguf", down=down)
    tokens = np.random.default_rng(3).integers(3, SMALL.n_vocab, 20)
    want = Reference.load(path).logits(tokens.tolist())
    with opened(path, options(), SPLITS[name], **STREAMED) as model:
        found = run_chunks(model, tokens, 20)
    if down is Type.F32:
        np.testing.assert_allclose(found, want, atol=ROUNDING)
    assert relative_l2(found, want) < MANY_TOKENS


@pytest.mark.parametrize("ffn", ["exact", "predicted"])
@pytest.mark.parametrize("dense_twin", [False, True])
@pytest.mark.parametrize("outtype", ["f16", "q8_0", "q4_0"])
def test_types(synth: Synth, outtype: str, dense_twin: bool, ffn: str) -> None:
    path = synth(outtype, dense_twin)
    asked = options(None if dense_twin else ffn, kv_type="f16")
    tokens = np.random.default_rng(7).integers(3, 200, 33)
    pieces = {"stream_tokens": FROM, "stream_piece_bytes": 160 * 1024}
    with (
        Model.open(path, asked) as cpu,
        opened(path, asked, ((64, 160), (256, 256)), **pieces) as hybrid,
    ):
        found, want = (run_chunks(model, tokens, 33) for model in (hybrid, cpu))
    assert relative_l2(found, want) < MANY_TOKENS


def test_counts_and_records(path: Path) -> None:
    """As on the CPU, of exact and of masked tokens."""
    mask = np.arange(40) >= 20
    tokens, _ = clear_text(path, mask)
    rules = np.where(mask, FfnRule.PREDICT, FfnRule.EXACT)
    seen = []
    with (
        Model.open(path, options("predicted")) as cpu,
        opened(path, options("predicted"), SPLITS["pulled"], **STREAMED) as hybrid,
    ):
        for model in (cpu, hybrid):
            model.engine.record_fired(True)
            model.engine.run(Batch(tokens, ffn_rules=rules))
            stats = model.stats()
            counts = (stats.neurons_total, stats.neurons_guessed, stats.neurons_active)
            seen.append((model.engine.fired(), counts))
    assert (seen[0][0] == seen[1][0]).all()
    assert seen[0][0].any()
    assert seen[0][1] == seen[1][1]


def test_the_cpu_computes_nothing(path: Path) -> None:
    """What tells a streamed step from one that was handed over: no time of the CPU, and the memory of the pieces."""
    tokens = np.arange(20) + 3
    taken = []
    for change in ({}, STREAMED):
        with opened(path, options("exact"), SPLITS["half"], **change) as model:
            model.engine.time_layers(True)
            model.engine.run(Batch(tokens))
            busy = [times.cpu_ns for times in model.engine.layer_times()]
            assert all(ns == 0 for ns in busy) if change else all(ns > 0 for ns in busy)
            model.engine.run(Batch(tokens[:16]))
            assert all(times.cpu_ns > 0 for times in model.engine.layer_times())
            taken.append(model.stats().pinned_bytes)
    assert taken[1] - taken[0] == 2 * STREAMED["stream_piece_bytes"]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"stream_tokens": 16}, UsageError, "stream_tokens = 16 is not above 16"),
        ({"stream_piece_bytes": 32 * 1024}, UsageError, "too small for 32 neurons"),
    ],
)
def test_refused(path: Path, change: dict[str, int], kind: type[PiError], message: str) -> None:
    with ModelFile(path) as file:
        plan = split_plan(file, options("exact"), SPLITS["half"], **(STREAMED | change))
        with pytest.raises(kind, match=message):
            Model(file, plan)
