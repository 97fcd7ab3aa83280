"""Loading and closing, a thousand times and in eight threads at once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.sampling import Sampling

CYCLES, WARM_UP = 1000, 200
# What the C library keeps for later threads, and an arena of 1 MiB that Python takes for later objects: 4,000 cycles
# take no more than 1.25 MB. A leak of one page a cycle would be 4 MB.
RSS_SLACK_BYTES = 2 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def held() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def use(path: Path, cycle: int) -> None:
    """Closed unused, used, in the middle of a generation, or by the collector."""
    model = Model.load(path, threads=2, context=32)
    if cycle % 2:
        model.logits([1, 2, 3])
    if cycle % 4 == 3:
        next(model.generate([5], sampling=Sampling(seed=1), ignore_eos=True))
    if cycle % 8:
        model.close()


@pytest.mark.resources
def test_a_thousand_cycles_leave_nothing(synthetic_gguf):
    path = synthetic_gguf("predictors")
    for cycle in range(WARM_UP):
        use(path, cycle)
    before, rss = held(), resident_bytes()
    for cycle in range(CYCLES):
        use(path, cycle)
    assert held() == before
    assert resident_bytes() - rss < RSS_SLACK_BYTES


@pytest.mark.parametrize("n_threads", [1, 2])
def test_eight_models_in_eight_threads(n_threads, synthetic_gguf):
    path = synthetic_gguf("predictors")
    found: list[object] = [None] * 8

    def work(i: int) -> None:
        with Model.load(path, threads=n_threads) as model:
            logits = model.logits(range(3, 40)).tobytes()
            generation = model.generate("w1 w2", n_predict=8, sampling=Sampling(seed=1))
            found[i] = (
                logits,
                [token.id for token in generation],
                model.metadata("llama.block_count"),
            )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is not None
    assert all(result == found[0] for result in found)
