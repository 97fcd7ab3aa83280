"""Random splits under a random load: results are the CPU's, nothing piles up (about 40 s)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gpu.hybrid import CPU_LAYER, SMALL, Range, opened, options, small_file
from gpu.test_handover import asking
from gpu.test_hybrid import HANDED
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime.engine import Batch
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.plan.plan import HandOver

pytestmark = pytest.mark.usefixtures("device_library")

N = SMALL.n_ff
N_PLANS, N_STEPS = 6, 6
SEQUENCES = 3
WAYS = (HandOver.AUTO, HandOver.SPIN, HandOver.WAIT_VALUE, HandOver.EVENT)


def random_ranges(rng: np.random.Generator) -> tuple[Range, ...]:
    """Some layers on the CPU, then split ones, whole ones among them."""
    n_cpu = int(rng.integers(0, SMALL.n_layers))
    ranges = [CPU_LAYER] * n_cpu
    for _ in range(SMALL.n_layers - n_cpu):
        hot, pull = sorted(32 * rng.integers(0, N // 32 + 1, 2))
        ranges.append((int(hot), int(pull)))
    return tuple(ranges)


def random_batch(rng: np.random.Generator) -> Batch:
    """1, 2-16 or 17-40 tokens of one or several sequences."""
    n = int(rng.choice([1, 1, int(rng.integers(2, 17)), int(rng.integers(17, 40))]))
    sequences = (
        rng.integers(0, SEQUENCES, n) if rng.random() < 0.4 else int(rng.integers(SEQUENCES))
    )
    tokens = rng.integers(3, SMALL.n_vocab, n)
    return Batch(tokens, sequences=sequences, want_logits=rng.random(n) < 0.5, targets=tokens)


def aborted(model: Model, batch: Batch, n_asked: int) -> bool:
    asked = iter(range(n_asked))
    try:
        with asking(model, lambda: next(asked, None) is None):
            model.engine.run(batch)
    except PiError:
        return True
    return False


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_file(tmp_path_factory.mktemp("stress") / "small.gguf")


def load(path: Path, seed: int, n_steps: int = N_STEPS) -> None:
    """Steps on a random split and on the CPU; some of the split's are aborted first, and then repeated."""
    rng = np.random.default_rng(seed)
    asked = options("exact", sequences=SEQUENCES, context=256)
    way = WAYS[seed % len(WAYS)]
    with (
        Model.open(path, asked) as cpu,
        opened(path, asked, random_ranges(rng), handover=way) as hybrid,
    ):
        for _ in range(n_steps):
            batch = random_batch(rng)
            lengths = [cpu.engine.kv_length(i) for i in range(SEQUENCES)]
            if rng.random() < 0.3 and not aborted(hybrid, batch, int(rng.integers(0, 3))):
                for sequence, n in enumerate(lengths):  # it came through before it was asked
                    hybrid.engine.kv_truncate(sequence, n)
            assert [hybrid.engine.kv_length(i) for i in range(SEQUENCES)] == lengths
            for model in (cpu, hybrid):
                model.engine.run(batch)
            for of in (lambda engine: engine.logits(), lambda engine: engine.logprobs()):
                np.testing.assert_allclose(of(hybrid.engine), of(cpu.engine), atol=HANDED)
            sequence = int(rng.integers(SEQUENCES))
            length = int(rng.integers(0, cpu.engine.kv_length(sequence) + 1))
            for model in (cpu, hybrid):
                model.engine.kv_truncate(sequence, length)


def test_random_splits(path: Path) -> None:
    for seed in range(N_PLANS):
        load(path, seed)


def test_engines_leave_nothing(path: Path) -> None:
    """Threads, open files and memory of splits made and ended again and again."""
    for seed in (0, 1):
        load(path, seed, 2)
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    before = resident_bytes()
    for seed in (0, 1, 0, 1):
        load(path, seed, 2)
    assert len(os.listdir("/proc/self/task")) <= threads
    assert len(os.listdir("/proc/self/fd")) <= files
    assert resident_bytes() < before + 4 * 2**20
