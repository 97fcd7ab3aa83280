"""The planner: what every plan fulfils, the rule of FFN modes, refusals, JSON."""

from __future__ import annotations

import ctypes as ct
import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.small_plan import MACHINE, SHAPE
from powerinfer_toolkit.errors import DoesNotFit, PiError, UsageError
from powerinfer_toolkit.gguf_format import Activation, TensorType
from powerinfer_toolkit.runtime.plan.plan import FfnMode, Plan, UnitKind
from powerinfer_toolkit.runtime.plan.planner import (
    PlanOptions,
    choose_ffn_mode,
    memory_need,
    plan_cpu,
)
from powerinfer_toolkit.runtime.plan.shape import ModelShape

DENSE = dataclasses.replace(
    SHAPE,
    activation=Activation.SILU,
    sparse_layout=False,
    has_predictors=False,
    predictor_kind="none",
)
EXACT = dataclasses.replace(SHAPE, has_predictors=False, predictor_kind="none")
PLACEHOLDERS = dataclasses.replace(SHAPE, predictor_kind="all_active")

options = st.builds(
    PlanOptions,
    threads=st.none() | st.integers(1, 32),
    context=st.none() | st.integers(0, SHAPE.n_ctx_train),
    batch=st.integers(1, 2000),
    sequences=st.integers(1, 9),
    ffn=st.sampled_from([None, "dense", "exact", "predicted"]),
    kv_type=st.sampled_from([None, "f32", "f16"]),
    activation_type=st.sampled_from([None, "f32", "q8_0"]),
)


@settings(max_examples=1000, deadline=None)
@given(asked=options, layers=st.integers(1, 40), n_ff=st.integers(1, 5000))
def test_every_plan_is_whole(asked, layers, n_ff):
    shape = dataclasses.replace(SHAPE, n_layers=layers, n_ff=n_ff)
    plan = plan_cpu(shape, asked, MACHINE)
    _check_units(plan, shape)
    bounds = [tier.max_tokens for tier in plan.tiers]
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == plan.max_batch_tokens <= asked.batch
    assert plan.n_kv_pages == plan.n_sequences * math.ceil(plan.n_context / 32)
    assert 1 <= plan.n_context <= shape.n_ctx_train
    if plan.ffn_mode is FfnMode.PREDICTED:
        assert {t.ffn_mode for t in plan.tiers if t.max_tokens <= 16} == {FfnMode.PREDICTED}
        assert {t.ffn_mode for t in plan.tiers if t.max_tokens > 16} <= {FfnMode.EXACT}
    else:
        assert len(plan.tiers) == 1
    assert Plan.from_json(plan.to_json()) == plan


def _check_units(plan: Plan, shape: ModelShape) -> None:
    units = list(plan.units)
    assert len(set(units)) == len(units)
    for layer in range(shape.n_layers):
        kinds = [unit.kind for unit in units if unit.layer == layer]
        wanted = {UnitKind.ATTENTION, UnitKind.KV, UnitKind.PREDICTOR, UnitKind.NEURONS}
        assert wanted <= set(kinds)
        neurons = [u for u in units if u.kind is UnitKind.NEURONS and u.layer == layer]
        ends = [0, *(unit.end for unit in neurons)]
        assert [unit.begin for unit in neurons] == ends[:-1]
        assert ends[-1] == shape.n_ff
    assert {UnitKind.EMBEDDING, UnitKind.HEAD} <= {unit.kind for unit in units}


def test_the_memory_ceiling_is_kept_exactly():
    """The smallest machine that a plan accepts has just what the plan needs."""
    plan = plan_cpu(SHAPE, PlanOptions(), MACHINE)
    needed = memory_need(SHAPE, plan).allocated_bytes
    plan_cpu(SHAPE, PlanOptions(), dataclasses.replace(MACHINE, available_bytes=needed))
    short = dataclasses.replace(MACHINE, available_bytes=needed - 1)
    with pytest.raises(DoesNotFit, match="KV cache"):
        plan_cpu(SHAPE, PlanOptions(), short)


def test_kv_bytes_by_hand():
    plan = plan_cpu(SHAPE, PlanOptions(context=40, kv_type="f16", sequences=2), MACHINE)
    # 2 pages of 32 tokens a sequence; K and V, 3 layers, 2 KV heads of 16 float16
    assert memory_need(SHAPE, plan).kv_bytes == 2 * 64 * (2 * 3 * 2 * 16 * 2)


@pytest.mark.parametrize(
    ("shape", "loss", "default"),
    [
        (DENSE, None, FfnMode.DENSE),
        (EXACT, None, FfnMode.EXACT),
        (SHAPE, None, FfnMode.EXACT),
        (SHAPE, 0.02, FfnMode.EXACT),
        (SHAPE, 0.01, FfnMode.PREDICTED),
        (PLACEHOLDERS, 0.0, FfnMode.EXACT),
        (dataclasses.replace(EXACT, sparse_layout=False), None, FfnMode.DENSE),
        (dataclasses.replace(SHAPE, activation=Activation.SILU), 0.0, FfnMode.DENSE),
    ],
)
def test_default_mode(shape, loss, default):
    assert choose_ffn_mode(dataclasses.replace(shape, perplexity_loss=loss), None) is default


@pytest.mark.parametrize(
    ("shape", "asked", "says"),
    [
        (DENSE, "exact", "needs a ReLU model"),
        (DENSE, "predicted", "needs a ReLU model"),
        (EXACT, "predicted", "this file has none"),
        (PLACEHOLDERS, "predicted", "let every neuron through"),
        (dataclasses.replace(EXACT, sparse_layout=False), "exact", "ffn_down_t"),
        (SHAPE, "sparse", "unknown FFN mode"),
    ],
)
def test_modes_that_a_file_cannot_run(shape, asked, says):
    with pytest.raises(UsageError, match=says) as refusal:
        choose_ffn_mode(shape, asked)
    assert refusal.value.hint


def test_predict_all_masks_every_tier():
    plan = plan_cpu(SHAPE, PlanOptions(predict_all=True), MACHINE)
    assert {tier.ffn_mode for tier in plan.tiers} == {FfnMode.PREDICTED}
    assert plan.predicted_tokens == plan.max_batch_tokens
    with pytest.raises(UsageError, match="predict-all"):
        plan_cpu(SHAPE, PlanOptions(predict_all=True, ffn="exact"), MACHINE)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (PlanOptions(threads=0), "threads 0"),
        (PlanOptions(threads=33), "threads 33"),
        (PlanOptions(context=8193), "above the 8192"),
        (PlanOptions(context=-1), "context -1"),
        (PlanOptions(batch=0), "batch 0"),
        (PlanOptions(sequences=0), "sequences 0"),
        (PlanOptions(kv_type="q8_0"), "unknown KV type"),
        (PlanOptions(activation_type="f16"), "unknown activation type"),
        (PlanOptions(ffn="exact", sparse_threshold=0.0), "no effect"),
        (PlanOptions(ffn="predicted", sparse_threshold=math.nan), "not a number"),
    ],
)
def test_refused_options(asked, says):
    with pytest.raises(UsageError, match=says):
        plan_cpu(SHAPE, asked, MACHINE)


def test_choices_left_to_the_planner():
    plan = plan_cpu(SHAPE, PlanOptions(), MACHINE)
    assert (plan.n_threads, plan.n_context) == (4, 4096)
    assert (plan.kv_type, plan.activation_type) == (TensorType.F16, TensorType.Q8_0)
    floats = plan_cpu(SHAPE, PlanOptions(activation_type="f32"), MACHINE)
    assert (floats.kv_type, floats.activation_type) == (TensorType.F32, TensorType.F32)
    whole = plan_cpu(SHAPE, PlanOptions(context=0), MACHINE)
    assert whole.n_context == 8192
    small = dataclasses.replace(SHAPE, n_ctx_train=100, float32_weights=True)
    plan = plan_cpu(small, PlanOptions(), MACHINE)
    assert (plan.n_context, plan.kv_type, plan.max_batch_tokens) == (100, TensorType.F32, 100)


def test_infinite_thresholds_become_the_largest_numbers():
    asked = PlanOptions(ffn="predicted", sparse_threshold=-math.inf)
    plan = plan_cpu(SHAPE, asked, MACHINE)
    assert plan.sparse_threshold == -(2.0 - 2.0**-23) * 2.0**127
    assert "Infinity" not in plan.to_json()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1}', "null"])
def test_what_is_no_plan(text):
    with pytest.raises(PiError, match="not a plan"):
        Plan.from_json(text)


def test_damaged_plans_are_refused():
    document = json.loads(plan_cpu(SHAPE, PlanOptions(), MACHINE).to_json())
    for key in document:
        damaged = {name: value for name, value in document.items() if name != key}
        if key not in (
            "predict_all",
            "sparse_threshold",
            "isa",
            "ram_budget_bytes",
            "vram_budget_bytes",
            "cpus",
            "predict_split_only",
            "handover",
            "stream_tokens",
            "stream_piece_bytes",
        ):
            with pytest.raises(PiError, match="not a plan"):
                Plan.from_json(json.dumps(damaged))
    with pytest.raises(PiError, match="not a plan"):
        Plan.from_json(json.dumps(document | {"placement": "moon"}))


def test_native_form():
    plan = plan_cpu(SHAPE, PlanOptions(ffn="predicted", isa="scalar"), MACHINE)
    native = plan.to_native()
    assert native.size == ct.sizeof(native)
    units = [native.units[i] for i in range(native.n_units)]
    assert [(u.kind, u.layer, u.begin, u.end) for u in units] == [
        (u.kind, u.layer, u.begin, u.end) for u in plan.units
    ]
    tiers = [native.tiers[i] for i in range(native.n_tiers)]
    assert [(t.max_tokens, t.ffn_mode) for t in tiers] == [(1, 2), (4, 2), (16, 2), (512, 1)]
    assert math.isnan(native.sparse_threshold)
    assert native.isa == b"scalar"
