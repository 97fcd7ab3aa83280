"""Layers split by neurons between a device and the CPU, against the float64 reference and the CPU alone.

Small float32 files: neither side rounds weights or activations, so logits near 1 differ from float64 by the rounding of
float32 sums alone (ROUNDING, as on the CPU: eps x sqrt(n) x depth), in steps of any size. Other types: steps of up
to 16 tokens differ by the rounding of vectors to 16 bits on the device (FEW_TOKENS, as for a whole GPU);
larger ones round the device's activations and weights to float16 (MANY_TOKENS).

What the sides hand each other are integers of 16 bits with a power of two for six of them (HANDED). The largest of six
normal numbers is about 1.6 sigma, the power of two above it 2.2, a step 2^-15 of that, its error step / sqrt(12), 2e-5
sigma. A layer hands x over, which counts in gate and up, and the share: sqrt(3) of those, three layers sqrt(3) again:
6e-5 of logits near 1, and 4 of these are the largest of ten thousand: 2.4e-4. Twice that is allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from gpu.hybrid import (
    CPU_LAYER,
    SMALL,
    Range,
    clear_text,
    dense_file,
    opened,
    options,
    small_file,
    split_plan,
)
from gpu.models import Synth
from gpu.test_model import FEW_TOKENS, MANY_TOKENS, NEXT, steps
from parity import synthetic
from parity.closeness import relative_l2
from parity.reference import Reference
from parity.steps import run_chunks
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.runtime.engine import Batch, FfnRule
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.plan import Placement, Plan, UnitKind

pytestmark = pytest.mark.usefixtures("device_library")

ROUNDING = 2e-5
HANDED = 5e-4
N = SMALL.n_ff
Ranges = tuple[Range, ...]
# Of three layers of 160 neurons.
SPLITS: dict[str, Ranges] = {
    "nothing on the GPU": ((0, 0), (0, 0), (0, 0)),
    "one word on the GPU": ((32, 32), (32, 32), (32, 32)),
    "half": ((64, 64), (96, 96), (64, 64)),
    "all but one word on the GPU": ((128, 128), (128, 128), (128, 128)),
    "pulled": ((0, 32), (32, 128), (64, 96)),
    "nothing on the CPU": ((0, N), (128, N), (32, N)),
    "three kinds of layers": (CPU_LAYER, (64, 96), (N, N)),
    "split between whole ones": ((N, N), (64, 64), (N, N)),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_file(tmp_path_factory.mktemp("hybrid") / "small.gguf")


@pytest.fixture(scope="module")
def dense_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_file(tmp_path_factory.mktemp("hybrid") / "dense.gguf")


@pytest.fixture(scope="module")
def plain(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A text and its logits with every neuron."""
    return clear_text(path, np.zeros(32, dtype=bool))


@pytest.fixture(scope="module")
def masked(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A text, the rules of its tokens (about half are masked, not the sink), and its logits."""
    mask = np.random.default_rng(5).random(16) < 0.5
    mask[0] = False
    tokens, logits = clear_text(path, mask)
    return tokens, np.where(mask, FfnRule.PREDICT, FfnRule.EXACT), logits


@pytest.mark.parametrize("name", SPLITS)
def test_exact(path: Path, plain: tuple[np.ndarray, np.ndarray], name: str) -> None:
    """A prompt in one step, then tokens one by one, then a few at a time."""
    tokens, want = plain
    with opened(path, options("exact"), SPLITS[name]) as model:
        parts = [run_chunks(model, tokens[:20], 20), run_chunks(model, tokens[20:22], 1)]
        parts.append(run_chunks(model, tokens[22:], 5))
        handed = any(pull < N for _, pull in SPLITS[name] if pull >= 0)
        atol = HANDED if handed else ROUNDING
        np.testing.assert_allclose(np.concatenate(parts), want, atol=atol)


def test_predictors_of_any_rank(tmp_path: Path) -> None:
    """pi-train-predictor's own rank is 48; the device's kernels take multiples of 32."""
    path = small_file(tmp_path / "ranks.gguf", dataclasses.replace(SMALL, ranks=(48, 20, 33)))
    tokens, want = clear_text(path, np.arange(16) > 0)  # all but the sink
    for ranges in (SPLITS["half"], ((N, N), (N, N), (N, N))):
        with opened(path, options("predicted"), ranges) as model:
            for size in (1, 16):
                model.forget()
                found = run_chunks(model, tokens, size)
                np.testing.assert_allclose(found, want, atol=HANDED)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("nothing on the GPU", 16),
        ("one word on the GPU", 4),
        ("half", 1),
        ("all but one word on the GPU", 16),
        ("pulled", 1),
        ("pulled", 16),
        ("nothing on the CPU", 4),
        ("three kinds of layers", 16),
    ],
)
def test_predicted(
    path: Path, masked: tuple[np.ndarray, np.ndarray, np.ndarray], name: str, size: int
) -> None:
    """Every token of a step keeps its own mask, on both sides."""
    tokens, rules, want = masked
    with opened(path, options("predicted"), SPLITS[name]) as model:
        got = []
        for begin in range(0, len(tokens), size):
            part = slice(begin, begin + size)
            model.engine.run(Batch(tokens[part], ffn_rules=rules[part], want_logits=True))
            got.append(model.engine.logits())
        np.testing.assert_allclose(np.concatenate(got), want, atol=HANDED)


@pytest.mark.parametrize("size", [1, 16])
def test_counts_and_records(
    path: Path, masked: tuple[np.ndarray, np.ndarray, np.ndarray], size: int
) -> None:
    """As on the CPU; ranges that begin within a word of the record too."""
    tokens, rules, _ = masked
    seen = []
    with (
        Model.open(path, options("predicted")) as cpu,
        opened(path, options("predicted"), SPLITS["pulled"]) as hybrid,
    ):
        for model in (cpu, hybrid):
            model.engine.record_fired(True)
            fired = []
            for begin in range(0, len(tokens), size):
                part = slice(begin, begin + size)
                model.engine.run(Batch(tokens[part], ffn_rules=rules[part]))
                fired.append(model.engine.fired())
            stats = model.stats()
            counts = (stats.neurons_total, stats.neurons_guessed, stats.neurons_active)
            seen.append((np.concatenate(fired), counts))
    assert (seen[0][0] == seen[1][0]).all()
    assert seen[0][0].any()
    assert seen[0][1] == seen[1][1]


def test_exact_layers_of_the_file(tmp_path: Path) -> None:
    keys = {"powerinfer.predictor.exact_layers": [False, True, False]}
    path = small_file(tmp_path / "exact.gguf", **keys)
    mask = np.arange(12) > 0
    tokens, want = clear_text(path, mask)
    with opened(path, options("predicted"), SPLITS["half"]) as model:
        np.testing.assert_allclose(run_chunks(model, tokens, 4), want, atol=HANDED)


def test_predicted_in_split_layers_only(tmp_path: Path) -> None:
    """predict_split_only: whole layers, on either side, are as if the file wanted them exact."""
    keys = {"powerinfer.predictor.exact_layers": [True, False, True]}
    told = small_file(tmp_path / "told.gguf", **keys)
    tokens, want = clear_text(told, np.arange(12) > 0)
    path = small_file(tmp_path / "untold.gguf")
    ranges = SPLITS["three kinds of layers"]
    with opened(path, options("predicted"), ranges, predict_split_only=True) as model:
        np.testing.assert_allclose(run_chunks(model, tokens, 4), want, atol=HANDED)


def test_masks_of_a_whole_prompt(path: Path) -> None:
    """predict_all masks steps of more tokens than the predictor takes at a time."""
    tokens, want = clear_text(path, np.ones(20, dtype=bool))
    asked = options("predicted", predict_all=True)
    with opened(path, asked, SPLITS["pulled"]) as model:
        np.testing.assert_allclose(run_chunks(model, tokens, 20), want, atol=HANDED)


@pytest.mark.parametrize("name", ["nothing on the GPU", "half", "pulled", "three kinds of layers"])
def test_a_plain_layout(dense_path: Path, name: str) -> None:
    """Gate and up by rows, ffn_down by columns."""
    tokens = np.random.default_rng(3).integers(3, SMALL.n_vocab, 26)
    want = Reference.load(dense_path).logits(tokens.tolist())
    with opened(dense_path, options(), SPLITS[name]) as model:
        parts = [run_chunks(model, tokens[:20], 20), run_chunks(model, tokens[20:22], 1)]
        parts.append(run_chunks(model, tokens[22:], 4))
        np.testing.assert_allclose(np.concatenate(parts), want, atol=HANDED)


def test_sequences(path: Path, plain: tuple[np.ndarray, np.ndarray]) -> None:
    """Copied, truncated, saved and loaded into a CPU's engine; several in a step."""
    tokens, want = plain
    asked = options("exact", sequences=3)
    with opened(path, asked, SPLITS["pulled"]) as model, Model.open(path, asked) as cpu:
        engine = model.engine
        run_chunks(model, tokens[:20], 20)
        engine.kv_copy(0, 1)
        engine.kv_load(2, engine.kv_save(0))
        engine.run(Batch(tokens[[20, 20, 20]], sequences=[0, 1, 2], want_logits=True))
        np.testing.assert_allclose(engine.logits(), want[[20, 20, 20]], atol=HANDED)
        engine.kv_truncate(1, 10)
        np.testing.assert_allclose(
            run_chunks(model, tokens[10:13], 1, sequence=1), want[10:13], atol=HANDED
        )
        cpu.engine.kv_load(0, engine.kv_save(0))
        np.testing.assert_allclose(run_chunks(cpu, tokens[21:24], 1), want[21:24], atol=HANDED)


def test_shares_that_float16_does_not_hold(tmp_path: Path) -> None:
    """A layer whose FFN is a million times the others' hands over as exactly as they do."""
    weights = synthetic.random_weights(SMALL, seed=0)
    weights["blk.1.ffn_down_t.weight"] *= 1e6
    path = synthetic.write_gguf(
        tmp_path / "large.gguf", SMALL, weights, keys={"powerinfer.activation": "relu"}
    )
    tokens = np.random.default_rng(4).integers(3, SMALL.n_vocab, 8)
    want = Reference.load(path).logits(tokens.tolist())
    with opened(path, options("exact"), SPLITS["half"]) as model:
        np.testing.assert_allclose(run_chunks(model, tokens, 1), want, atol=HANDED)


@pytest.mark.parametrize("ffn", ["exact", "predicted"])
@pytest.mark.parametrize("outtype", ["f16", "q8_0", "q4_0"])
def test_types(synth: Synth, outtype: str, ffn: str) -> None:
    path = synth(outtype)
    asked = options(ffn, kv_type="f16")
    with Model.open(path, asked) as cpu, opened(path, asked, ((64, 160), (256, 256))) as hybrid:
        for token in NEXT:
            for model in (cpu, hybrid):
                model.engine.run(Batch([token], want_logits=True))
            assert relative_l2(hybrid.engine.logits(), cpu.engine.logits()) < 10 * FEW_TOKENS
        for got, want in zip(steps(hybrid), steps(cpu), strict=True):
            assert relative_l2(got, want) < MANY_TOKENS
        a, b = hybrid.stats(), cpu.stats()
        assert a.neurons_total == b.neurons_total
        # A pre-activation beside 0 may fall on either side.
        assert a.neurons_active == pytest.approx(b.neurons_active, rel=2e-3)
        assert a.neurons_guessed == pytest.approx(b.neurons_guessed, rel=2e-3)


@pytest.mark.parametrize("outtype", ["f16", "q8_0"])
def test_types_of_a_plain_layout(synth: Synth, outtype: str) -> None:
    path = synth(outtype, dense_twin=True)
    with (
        Model.open(path, options()) as cpu,
        opened(path, options(), ((64, 160), (256, 256))) as hybrid,
    ):
        for got, want in zip(steps(hybrid), steps(cpu), strict=True):
            assert relative_l2(got, want) < MANY_TOKENS


def placed(kind: UnitKind, placement: Placement, layer: int = 1) -> Callable[[Plan], Plan]:
    """Moves the units of a kind of one layer elsewhere."""

    def change(plan: Plan) -> Plan:
        here = [(u.kind, u.layer) == (kind, layer) for u in plan.units]
        units = (
            dataclasses.replace(u, placement=placement) if moved else u
            for u, moved in zip(plan.units, here, strict=True)
        )
        return dataclasses.replace(plan, units=tuple(units))

    return change


def backwards(plan: Plan) -> Plan:
    """The CPU's neurons before the GPU's."""
    swap = {Placement.CPU: Placement.GPU, Placement.GPU: Placement.CPU}
    units = (
        dataclasses.replace(u, placement=swap[u.placement]) if u.kind is UnitKind.NEURONS else u
        for u in plan.units
    )
    return dataclasses.replace(plan, units=tuple(units))


def with_fields(**fields: object) -> Callable[[Plan], Plan]:
    return lambda plan: dataclasses.replace(plan, **fields)


HALF = SPLITS["half"]
Refused = tuple[Ranges, Callable[[Plan], Plan], str]
REFUSED: dict[str, Refused] = {
    "within a word": (
        ((33, 64), (0, 0), (0, 0)),
        with_fields(),
        "neuron 33, not at a multiple of 32",
    ),
    "a CPU layer behind": (
        ((64, 64), CPU_LAYER, (N, N)),
        with_fields(),
        "layer 1 is on the CPU behind",
    ),
    "attention": (
        HALF,
        placed(UnitKind.ATTENTION, Placement.CPU),
        "layer 1 has its attention, KV cache",
    ),
    "KV cache": (HALF, placed(UnitKind.KV, Placement.CPU), "layer 1 has its attention, KV cache"),
    "predictor": (HALF, placed(UnitKind.PREDICTOR, Placement.CPU), "layer 1 has its attention"),
    "pulled KV cache": (HALF, placed(UnitKind.KV, Placement.PULL), "only neurons can be pulled"),
    "streamed": (HALF, placed(UnitKind.NEURONS, Placement.STREAM), "does not stream weights"),
    "backwards": (HALF, backwards, "neurons of the GPU come first"),
    "GPU neurons of a CPU layer": (
        (CPU_LAYER, *HALF[1:]),
        placed(UnitKind.NEURONS, Placement.GPU, layer=0),
        "layer 0 has neurons on the GPU, but not its attention",
    ),
    "two rules": (
        HALF,
        with_fields(predict_all=True, predict_split_only=True),
        "masks every layer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_plans(path: Path, name: str) -> None:
    ranges, change, message = REFUSED[name]
    with ModelFile(path) as file, pytest.raises(PiError, match=message):
        Model(file, change(split_plan(file, options("exact"), ranges)))


def test_columns_are_cut_between_blocks(tmp_path: Path) -> None:
    """A K-quant's block of ffn_down is 256 columns."""
    shape = dataclasses.replace(SMALL, n_layers=2, n_ff=768, ranks=())
    path = dense_file(tmp_path / "q4_k.gguf", shape, Type.Q4_K)
    want = Reference.load(path).logits([5, 6])
    with pytest.raises(UsageError, match="neuron 64, not at a multiple of 256"):
        opened(path, options(), ((64, 64), (64, 64)))
    with opened(path, options(), ((256, 512), (0, 256))) as model:
        got = run_chunks(model, [5, 6], 1)
        assert relative_l2(got, want) < FEW_TOKENS


def resident_bytes(path: Path) -> int:
    """Of the file's maps, what is in this process's memory."""
    total, here = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        if line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024 if here else 0
        elif "-" in line.split(maxsplit=1)[0]:
            here = line.endswith(str(path))
    return total


@pytest.mark.parametrize("ffn", ["dense", "exact"])
def test_the_files_pages_of_the_device_are_dropped(tmp_path: Path, ffn: str) -> None:
    """What is left are the CPU's neurons."""
    n_ff, hot, n_embd = 8192, 6656, 256
    shape = dataclasses.replace(SMALL, n_layers=2, n_embd=n_embd, n_ff=n_ff, ranks=())
    path = small_file(tmp_path / "wide.gguf", shape)
    cpu_bytes = shape.n_layers * 3 * (n_ff - hot) * n_embd * 4
    slack = shape.n_layers * 3 * 2 * 2**21  # a range's edges lie in huge pages, at worst
    with opened(path, options(ffn), ((hot, hot), (4096, hot))) as model:
        assert resident_bytes(path) < 2**20
        model.engine.run(Batch([5]))
        # Exact mode reads only rows of up and down that fire.
        least = cpu_bytes if ffn == "dense" else cpu_bytes // 3
        assert least - 64 * 1024 < resident_bytes(path) < cpu_bytes + slack
    assert path.stat().st_size > 1.3 * (cpu_bytes + slack)
