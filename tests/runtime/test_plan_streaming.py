"""Which steps of split models stream the CPU's neurons, on the described machine of test_plan_gpu.py (about 2 s)."""

from __future__ import annotations

import dataclasses
import re

import pytest

from parity.machines import DEVICE, MACHINE, PROFILE, plan_of
from parity.shapes import described
from powerinfer_toolkit.errors import DoesNotFit
from powerinfer_toolkit.runtime.plan.cost import token_cost
from powerinfer_toolkit.runtime.plan.need import gpu_need
from powerinfer_toolkit.runtime.plan.streaming import has_cold_neurons, without_streaming

THIRTEEN = described("13b")


def test_prompts_are_streamed_where_that_is_faster():
    """F16 at 49 GB/s: 2 bytes of a weight take as long as 33 tokens' 2 operations on 16 cores of 1e11 each."""
    for shape in ():
        plan = plan_of(shape, 11)
        assert (plan.stream_tokens, plan.stream_piece_bytes) == (33, 16 * 2**20)
        bare = without_streaming(plan)
        with_pieces, without = (gpu_need(shape, p, p.units, DEVICE) for p in (plan, bare))
        assert with_pieces.total_bytes - without.total_bytes == 32 * 2**20
        assert with_pieces.total_bytes <= plan.vram_budget_bytes
        slower = token_cost(shape, plan, PROFILE).seconds
        best = plan_of(shape, 11 + 1 / 32)  # with what streaming took
        assert slower <= 1.03 * token_cost(shape, best, PROFILE).seconds
    fewer = dataclasses.replace(MACHINE, n_cores=4)
    assert plan_of(THIRTEEN, 11, fewer).stream_tokens == 17  # never below what is handed over


@pytest.mark.parametrize(
    ("gib", "rates", "options"),
    [
        (28, {}, {}),  # all of it is on the GPU
        (11, {"pull_bytes_per_second": 0.0}, {}),  # not known
        (11, {"pull_bytes_per_second": 3e9}, {}),  # a slow bus
        (11, {}, {"batch": 32}),
        (11, {}, {"split": False}),
    ],
)
def test_prompts_are_not_streamed(gib, rates, options):
    machine = dataclasses.replace(MACHINE, profile=dataclasses.replace(PROFILE, **rates))
    plan = plan_of(THIRTEEN, gib, machine, **options)
    assert (plan.stream_tokens, plan.stream_piece_bytes) == (0, 0)


def test_a_budget_without_room_for_streaming():
    """Just above the least that a run takes: a run all the same, whose prompts are the CPU's."""
    with pytest.raises(DoesNotFit) as refused:
        plan_of(THIRTEEN, 0.6)
    least = int(re.search(r"--vram-budget (\d+)MiB", refused.value.hint)[1])
    plan = plan_of(THIRTEEN, (least + 1) / 1024)
    assert has_cold_neurons(THIRTEEN, plan)
    assert plan.stream_tokens == 0
    assert plan_of(THIRTEEN, (least + 33) / 1024).stream_tokens == 33
