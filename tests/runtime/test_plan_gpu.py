"""Plans with a GPU, of published shapes on a described machine: no GPU and no model file (about 8 s)."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time

import numpy as np
import pytest

from parity.machines import DEVICE, GIB, MACHINE, PROFILE, plan_of
from parity.shapes import described
from powerinfer_toolkit.errors import DoesNotFit, PiError, UsageError
from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime.plan.cost import (
    Reads,
    Shares,
    balanced_pull,
    bound_seconds,
    token_cost,
    with_mean,
)
from powerinfer_toolkit.runtime.plan.gpu import place
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.need import gpu_need, memory_need
from powerinfer_toolkit.runtime.plan.plan import (
    FfnMode,
    LayerPlace,
    Placement,
    Plan,
    Side,
    UnitKind,
    layer_places,
)
from powerinfer_toolkit.runtime.plan.planner import PlanOptions, plan_cpu
from powerinfer_toolkit.runtime.plan.profile import MachineProfile
from powerinfer_toolkit.runtime.plan.shape import ModelShape

BUDGETS = np.linspace(1.1, 28, 12)  # GiB, to above the 13b model in F16


@pytest.fixture(scope="module")
def thirteen() -> ModelShape:
    return described("13b")


@pytest.fixture(scope="module")
def dense() -> ModelShape:
    return described("13b", dense=True)


def seconds(shape: ModelShape, plan: Plan, profile: MachineProfile = PROFILE) -> float:
    return token_cost(shape, plan, profile).seconds


def taken(shape: ModelShape, plan: Plan) -> int:
    return gpu_need(shape, plan, plan.units, DEVICE).total_bytes


def places(shape: ModelShape, plan: Plan) -> list[LayerPlace]:
    return layer_places(plan.units, shape.n_layers)


CASES = {
    "predicted": ("13b", {}, {"ffn": "predicted"}),
    "exact": ("13b", {}, {"ffn": "exact"}),
    "dense": ("13b", {"dense": True}, {}),
    "70b": ("70b", {"kind": TensorType.Q4_0}, {"ffn": "predicted"}),
}


@pytest.mark.parametrize("case", CASES)
def test_more_memory_is_never_slower_and_never_exceeded(case):
    name, made, options = CASES[case]
    shape = described(name, **made)
    plans = [plan_of(shape, gib, **options) for gib in BUDGETS]
    times = [seconds(shape, plan) for plan in plans]
    # The search may miss a part of a step of a layer's neurons, 1/128 of one.
    assert all(after <= before * 1.002 for before, after in itertools.pairwise(times))
    assert times[-1] < times[0] / 2
    for gib, plan in zip(BUDGETS, plans, strict=True):
        need = taken(shape, plan)
        assert need <= gib * GIB
        whole = all(p.side is Side.GPU for p in places(shape, plan))
        # Nothing is left that another step of neurons would fit in.
        assert whole or need > gib * GIB - 32 * 2**20 or case == "70b"
    if case != "70b":
        assert all(p.side is Side.GPU for p in places(shape, plans[-1]))


def test_the_design_limits_of_the_13b_shape(thirteen, dense):
    """What the limits of the machine give by hand: 72 tok/s at 11 GiB without pulling, 290 at 22; dense 11 and 40."""
    no_pull = dataclasses.replace(MACHINE, profile=MachineProfile(3.8e12, 132e9, 132e9))

    def speed(shape: ModelShape, gib: float, machine: Machine) -> float:
        return 1 / seconds(shape, plan_of(shape, gib, machine), machine.profile)

    assert speed(thirteen, 11, no_pull) == pytest.approx(70, rel=0.15)
    assert speed(thirteen, 22, MACHINE) == pytest.approx(290, rel=0.15)
    assert speed(dense, 11, MACHINE) == pytest.approx(11.2, rel=0.05)
    assert speed(dense, 22, MACHINE) == pytest.approx(40, rel=0.05)
    assert speed(dense, 11, no_pull) == pytest.approx(8.5, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "dense", "step"),
    [
        (TensorType.F16, False, 32),
        (TensorType.Q4_0, True, 32),
        (TensorType.Q4_K, True, 256),
        (TensorType.Q4_K, False, 32),
    ],
)
def test_ranges_touch_at_whole_blocks(kind, dense, step):
    shape = described("7b", kind, dense=dense)
    plan = plan_of(shape, 4.0 if kind is TensorType.F16 else 2.5)
    split = [p for p in places(shape, plan) if p.side is Side.SPLIT]
    assert split
    for layer in split:
        assert layer.n_hot % step == 0
        assert layer.n_pull % step == 0 or layer.n_pull == shape.n_ff
        assert 0 <= layer.n_hot <= layer.n_pull <= shape.n_ff
        assert layer.n_hot < shape.n_ff
    neurons = [u for u in plan.units if u.kind is UnitKind.NEURONS]
    order = [Placement.GPU, Placement.PULL, Placement.CPU]
    for layer in range(shape.n_layers):
        units = [u for u in neurons if u.layer == layer]
        assert [units[0].begin, *(u.end for u in units)][-1] == shape.n_ff
        assert [u.begin for u in units[1:]] == [u.end for u in units[:-1]]
        ranks = [order.index(u.placement) for u in units]
        assert ranks == sorted(set(ranks))
    assert Plan.from_json(plan.to_json()) == plan


def test_layers_that_do_not_fit_are_the_first_ones(thirteen):
    plan = plan_of(thirteen, 5)
    sides = [p.side for p in places(thirteen, plan)]
    n_cpu = sides.count(Side.CPU)
    assert 0 < n_cpu < thirteen.n_layers
    assert sides == [Side.CPU] * n_cpu + [Side.SPLIT] * (thirteen.n_layers - n_cpu)
    for unit in plan.units:
        if unit.kind in (UnitKind.ATTENTION, UnitKind.KV, UnitKind.PREDICTOR):
            assert unit.placement is (Placement.CPU if unit.layer < n_cpu else Placement.GPU)
    assert plan.units[0].placement is Placement.CPU
    assert plan.units[-1].placement is Placement.GPU  # the head, read at every token


def test_modes_by_default(thirteen):
    """Predicted only where split, if no layer is the CPU's; and where all is on the GPU nothing is."""
    split, mixed, whole = (plan_of(thirteen, gib) for gib in (12, 5, 28))
    assert (split.ffn_mode, split.predict_split_only) == (FfnMode.PREDICTED, True)
    assert (mixed.ffn_mode, mixed.predict_split_only) == (FfnMode.PREDICTED, False)
    assert (whole.ffn_mode, whole.predict_split_only) == (FfnMode.EXACT, False)
    assert [t.max_tokens for t in whole.tiers] == [whole.max_batch_tokens]
    asked = plan_of(thirteen, 28, ffn="predicted")
    assert (asked.ffn_mode, asked.predict_split_only) == (FfnMode.PREDICTED, False)
    everywhere = plan_of(thirteen, 12, predict_all=True)
    assert (everywhere.predict_all, everywhere.predict_split_only) == (True, False)
    unsure = dataclasses.replace(thirteen, perplexity_loss=None)
    assert plan_of(unsure, 12).ffn_mode is FfnMode.EXACT
    # The predictors of layers that never predict take no memory of the GPU.
    assert taken(thirteen, asked) - taken(thirteen, whole) == sum(
        layer.device_predictor for layer in thirteen.parts.layers
    )


def test_without_a_split(thirteen):
    plan = plan_of(thirteen, 12, split=False)
    sides = [p.side for p in places(thirteen, plan)]
    n_cpu = sides.count(Side.CPU)
    assert sides == [Side.CPU] * n_cpu + [Side.GPU] * (thirteen.n_layers - n_cpu)
    assert seconds(thirteen, plan) > seconds(thirteen, plan_of(thirteen, 12))
    one_more = (taken(thirteen, plan) - DEVICE.context_bytes) / (thirteen.n_layers - n_cpu)
    assert taken(thirteen, plan) + one_more > 12 * GIB


def test_pulled_neurons_end_when_the_others_do(thirteen):
    plan = plan_of(thirteen, 12)
    cost = token_cost(thirteen, plan, PROFILE)
    for layer in cost.layers:
        assert layer.pull_bytes > 0
        # A step of 32 neurons is what rounding moves.
        assert layer.gpu_seconds == pytest.approx(layer.cpu_seconds, rel=0.1)
    pinned = memory_need(thirteen, plan).pinned_bytes
    rows = sum(p.n_pull - p.n_hot for p in places(thirteen, plan))
    assert pinned == rows * 3 * 5120 * 2
    unknown = dataclasses.replace(PROFILE, pull_bytes_per_second=0.0)
    alone = plan_of(thirteen, 12, dataclasses.replace(MACHINE, profile=unknown))
    assert memory_need(thirteen, alone).pinned_bytes == 0


def test_nothing_is_pinned_that_does_not_fit(thirteen):
    """Pinned memory is no cache: where the weights do not stay in memory anyway, nothing is pinned."""
    needed = memory_need(thirteen, plan_of(thirteen, 12)).total_bytes
    for available, pulls in ((needed, True), (needed - 1, False)):
        plan = plan_of(thirteen, 12, dataclasses.replace(MACHINE, available_bytes=available))
        assert (memory_need(thirteen, plan).pinned_bytes > 0) == pulls


def test_a_pull_at_any_rates():
    """The best division is at least as fast as the CPU alone and as a fine scan of divisions."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        gpu, cpu, beside, pull = rng.uniform(0.1, 10, 4)
        profile = MachineProfile(gpu, cpu, min(cpu, beside), pull)
        hot, cold = rng.uniform(0, 5, (2, 1))
        pulled, found = balanced_pull(hot, cold, profile)
        shares = np.linspace(0, 1, 2001) * cold[0]
        beside = profile.cpu_beside_bytes_per_second
        scan = np.maximum(hot / gpu + shares / pull, (cold - shares) / beside)
        scan[0] = max(hot[0] / gpu, cold[0] / cpu)
        assert found[0] == pytest.approx(scan.min(), rel=2e-3)
        assert 0 <= pulled[0] <= cold[0]


def test_the_budget_of_ram_counts_what_is_not_on_the_gpu(thirteen):
    alone = memory_need(thirteen, plan_cpu(thirteen, PlanOptions(context=1024), MACHINE))
    plan = plan_of(thirteen, 12)
    split = memory_need(thirteen, plan)
    on_gpu = gpu_need(thirteen, plan, plan.units, DEVICE)
    assert split.kv_bytes == 0
    assert alone.kv_bytes == on_gpu.kv_bytes
    # F16 rows of this shape need no padding: what is not on the GPU is in RAM, in the file or pinned.
    once = alone.weight_bytes - on_gpu.weight_bytes
    assert split.weight_bytes + split.pinned_bytes == pytest.approx(once, rel=1e-4)
    least = split.total_bytes
    assert plan_of(thirteen, 12, ram_budget_bytes=least).ram_budget_bytes == least
    with pytest.raises(DoesNotFit, match="of memory"):
        plan_of(thirteen, 12, ram_budget_bytes=least - 2**24)
    whole = memory_need(thirteen, plan_of(thirteen, 28))
    assert whole.weight_bytes == 0


def test_columns_keep_all_rows_of_a_plain_down_in_memory(dense):
    plan = plan_of(dense, 12)
    cold = sum(dense.n_ff - p.n_pull for p in places(dense, plan))
    n_split = sum(dense.n_ff - p.n_pull > 0 for p in places(dense, plan))
    embedding = 32000 * 5120 * 2
    rows, down = 5120 * 2 * 2, 5120 * 13824 * 2
    assert memory_need(dense, plan).weight_bytes == embedding + cold * rows + n_split * down


def test_below_the_least(thirteen):
    for split in (True, False):
        with pytest.raises(DoesNotFit, match="takes at least") as refusal:
            plan_of(thirteen, 0.6, split=split)
        least = int(str(refusal.value).split("at least ")[1].split(" MiB")[0])
        plan = plan_of(thirteen, least / 1024, split=split)
        assert taken(thirteen, plan) <= least * 2**20
        with pytest.raises(DoesNotFit):
            plan_of(thirteen, (least - 2) / 1024, split=split)


def test_files_without_statistics(thirteen):
    """Every neuron is alike: the time falls evenly, and no curve is made up."""
    bare = dataclasses.replace(thirteen, firing=(), predicted_density=None, perplexity_loss=0.0)
    plan = plan_of(bare, 12)
    reads = Reads(bare, plan)
    curve = reads.neurons(places(bare, plan)[0])
    np.testing.assert_allclose(np.diff(curve), curve[-1] / 128)
    hot, pulled, cold = reads.activation_shares(LayerPlace(0, Side.SPLIT, 3456, 6912))
    assert (hot, pulled, cold) == pytest.approx((0.25, 0.25, 0.5))
    assert seconds(bare, plan) > seconds(thirteen, plan_of(thirteen, 12))


def test_layers_that_never_predict_are_read_exactly(thirteen):
    exact = (True, *[False] * 39)
    shape = dataclasses.replace(thirteen, exact_layers=exact)
    plan = plan_of(shape, 12, ffn="predicted")
    first, second = token_cost(shape, plan, PROFILE).layers[:2]
    assert first.ffn_bytes > 2 * second.ffn_bytes
    # so the others get less of the budget
    assert first.place.n_hot > second.place.n_hot


def test_measured_shares_are_those_of_all_layers(thirteen):
    """Half of the layers compute every gate: of the others the guesses are fewer than the mean."""
    shape = dataclasses.replace(thirteen, exact_layers=(True,) * 20 + (False,) * 20)
    plan = plan_of(shape, 12, ffn="predicted")
    cost = token_cost(shape, plan, PROFILE, shares=Shares(0.1, 0.55))
    gate, up_down = 13824 * 5120 * 2, 2 * 13824 * 5120 * 2
    read = [sum(layer.ffn_bytes for layer in half) for half in (cost.layers[:20], cost.layers[20:])]
    assert read[0] == pytest.approx(20 * (gate + 0.1 * up_down), rel=2e-3)
    assert read[1] == pytest.approx(20 * (0.1 * gate + 0.1 * up_down), rel=2e-3)


def test_scaled_rates_have_the_mean_and_stay_rates():
    rates = np.linspace(1, 0.01, 128)[None].repeat(3, axis=0)
    for mean in (0.0, 0.02, 0.3, 0.7, 0.999, 1.0):
        found = with_mean(rates, mean)
        assert found.mean() == pytest.approx(mean, abs=1e-6)
        assert found.max() <= 1
        assert (np.diff(found) <= 1e-12).all()


def test_the_bound_is_what_the_design_says(thirteen):
    plan = plan_of(thirteen, 12)
    shares = Shares(0.1, 0.125)
    cost = token_cost(thirteen, plan, PROFILE, shares=shares, n_positions=64)
    always = sum(layer.always_bytes for layer in cost.layers) + cost.head_bytes
    ffn = 0.0
    for layer in cost.layers:
        cold = layer.pull_bytes + layer.cold_bytes
        ffn += max(layer.hot_bytes / 3.8e12, cold / (126e9 + 49e9))
    assert bound_seconds(cost, PROFILE) == pytest.approx(always / 3.8e12 + ffn + 40 * 5e-6)
    gate, up_down = 13824 * 5120 * 2, 2 * 13824 * 5120 * 2
    assert sum(c.ffn_bytes for c in cost.layers) == pytest.approx(
        40 * (gate * 0.125 + up_down * 0.1), rel=2e-3
    )
    assert bound_seconds(cost, PROFILE) < cost.seconds


def test_a_large_model_is_planned_quickly():
    shape = described("70b", TensorType.Q4_0)
    plan_of(shape, 24)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        plan_of(shape, 24)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.5


def test_a_machine_of_a_file():
    text = json.dumps(MACHINE.to_record())
    assert Machine.from_json(text) == MACHINE
    assert (
        Machine.from_json('{"n_cores": 4, "n_cpus": 8, "available_bytes": 1000000000}').device
        is None
    )


PROFILED = (
    '{"n_cores": 4, "n_cpus": 8, "available_bytes": 1, "profile": {"gpu_bytes_per_second": 1e12, '
    '"cpu_bytes_per_second": 5e10, "cpu_beside_bytes_per_second": 4e10, %s}}'
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"n_cores": 4}',
        '{"n_cores": 0, "n_cpus": 8, "available_bytes": 1}',
        '{"n_cores": "4", "n_cpus": 8, "available_bytes": 1}',
        '{"n_cores": 4, "n_cpus": 8, "available_bytes": 1, "moon": 2}',
        '{"n_cores": 4, "n_cpus": 8, "available_bytes": 1, "device": {"name": "x"}}',
        '{"n_cores": 4, "n_cpus": 8, "available_bytes": 1, "device": 7}',
        '{"n_cores": true, "n_cpus": 8, "available_bytes": 1}',
        '{"n_cores": 4, "n_cpus": 8, "available_bytes": 1' + "0" * 400 + "}",
        PROFILED % '"pull_bytes_per_second": -0.5',
        PROFILED % '"handover_seconds": []',
        PROFILED % '"handover_seconds": 1e999',
        "[" * 100_000,
    ],
)
def test_what_describes_no_machine(text):
    with pytest.raises(PiError, match="not a machine"):
        Machine.from_json(text)


def test_hand_overs_by_name(thirteen):
    slow = dataclasses.replace(MACHINE, profile=dataclasses.replace(PROFILE, handover_seconds=None))
    plans = {h: plan_of(thirteen, 12, slow, handover=h) for h in ("spin", "event", None)}
    assert plans["event"].handover.name == "EVENT"
    assert seconds(thirteen, plans["event"], slow.profile) > seconds(
        thirteen, plans["spin"], slow.profile
    )
    assert plans[None].handover.name == "AUTO"
    with pytest.raises(UsageError, match="unknown hand-over"):
        plan_of(thirteen, 12, handover="telepathy")


def test_the_whole_model_takes_the_embedding_along(thirteen):
    everything = taken(thirteen, plan_of(thirteen, 28))
    device = DEVICE
    sizes = plan_cpu(thirteen, PlanOptions(context=1024, ffn="exact"), MACHINE)
    whole = place(thirteen, sizes, everything, device, PROFILE, may_split=True)
    assert {u.placement for u in whole.units} == {Placement.GPU}
    one_less = place(thirteen, sizes, everything - 1, device, PROFILE, may_split=True)
    assert [u.kind for u in one_less.units if u.placement is Placement.CPU] == [UnitKind.EMBEDDING]
