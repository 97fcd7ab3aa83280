"""Steps recorded once and queued again: the device library's graphs, and whole models with and without them."""

from __future__ import annotations

import ctypes as ct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gpu.device import Device, DeviceError, Ptr
from gpu.models import MINI, N_VOCAB, NANO, Synth, has_driver, opened, options
from powerinfer_toolkit.runtime.engine import Batch
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.plan.planner import PlanOptions

N = 1000
RELU = 1
PAGE = 32
MOST_SERIES = 16  # that an engine keeps
GRAPH_BYTES = 8 << 20  # of the device, more than a graph of these tests takes


@contextmanager
def captured(device: Device) -> Iterator[Ptr]:
    """A graph of what is queued within; a test that fails there leaves no capture behind."""
    graph = Ptr()
    device.reserve(0, 0, 0, GRAPH_BYTES)
    device.begin_capture()
    try:
        yield graph
    except BaseException:
        device.end_capture(None)
        raise
    device.end_capture(ct.byref(graph))


def multiply_by(device: Device, x: int, by: int) -> None:
    """x [N] *= by, which is positive."""
    device.gated(RELU, 0.0, by, N, x, None)


def test_a_graph_repeats_what_was_recorded(device: Device) -> None:
    x, y = device.put(np.full(N, 2, np.float32)), device.put(np.full(N, 2, np.float32))
    before = device.info_now().n_launches
    with captured(device) as graph:
        multiply_by(device, y, x)
        multiply_by(device, x, y)
    assert device.info_now().n_launches == before
    np.testing.assert_array_equal(device.get(y, N), np.full(N, 2), "recording did something")
    for _ in range(3):
        device.launch_graph(graph)
    # Exponents of 2: (x, y) = (1, 1) -> (3, 2) -> (8, 5) -> (21, 13)
    np.testing.assert_array_equal(device.get(y, N), np.full(N, 2.0**13))
    np.testing.assert_array_equal(device.get(x, N), np.full(N, 2.0**21))
    device.zero(x, 4 * N)  # what is at the addresses may change
    device.launch_graph(graph)
    assert not device.get(y, N).any()
    device.release_graph(graph)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("empty", "allocating"),
        ("upload", "uploading"),
        ("download", "downloading"),
        ("release", "releasing memory"),
        ("synchronize", "synchronizing"),
        ("begin_capture", "recording"),
        ("launch_graph", "launching a graph"),
        ("scratch", "taking scratch"),
    ],
)
def test_what_waits_or_moves_memory_is_refused_while_recording(
    device: Device, name: str, what: str
) -> None:
    x = device.put(np.full(N, 2, np.float32))
    host = np.zeros(4, np.float32)
    calls: dict[str, Callable[[], object]] = {
        "empty": lambda: device.empty(4),
        "upload": lambda: device.upload(host.ctypes.data, 16, x),
        "download": lambda: device.download(x, 16, host.ctypes.data),
        "release": lambda: device.release(x),
        "synchronize": device.synchronize,
        "begin_capture": device.begin_capture,
        "launch_graph": lambda: device.launch_graph(None),
        "scratch": lambda: device.reserve(1 << 28, 0, 0, GRAPH_BYTES),
    }
    with captured(device) as graph:
        multiply_by(device, x, x)
        with pytest.raises(DeviceError, match=f"^{what} while a graph is being recorded"):
            calls[name]()
    device.launch_graph(graph)  # the rest of the recording is whole
    np.testing.assert_array_equal(device.get(x, N), np.full(N, 4, np.float32))
    device.release_graph(graph)


def test_a_recording_can_be_given_up(device: Device) -> None:
    x = device.put(np.full(N, 2, np.float32))
    with pytest.raises(DeviceError, match="no graph is being recorded"):
        device.end_capture(None)
    device.begin_capture()
    multiply_by(device, x, x)
    device.end_capture(None)
    multiply_by(device, x, x)
    np.testing.assert_array_equal(device.get(x, N), np.full(N, 4, np.float32))


def test_scratch_stays_where_graphs_know_it(device: Device) -> None:
    x = device.put(np.full(N, 2, np.float32))
    with captured(device) as graph:
        multiply_by(device, x, x)
    with pytest.raises(DeviceError, match="more scratch than was reserved before graphs were made"):
        device.reserve(1 << 28, 0, 0, GRAPH_BYTES)
    device.release_graph(graph)


# ---- models -----------------------------------------------------------------------------------------------

Tokens = tuple[np.ndarray, int | list[int]]  # of a step, and the sequences that they are of


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, N_VOCAB, n)


@contextmanager
def both(path: Path, asked: PlanOptions) -> Iterator[tuple[Model, Model]]:
    """The model with graphs and without."""
    with pytest.MonkeyPatch.context() as environment, opened(path, asked) as graphs:
        environment.setenv("PI_GPU_GRAPHS", "0")
        with opened(path, asked) as direct:
            yield graphs, direct


def run(model: Model, batch: Tokens) -> np.ndarray:
    model.engine.run(Batch(batch[0], sequences=batch[1], want_logits=True))
    return model.engine.logits().copy()


def page_bucket(n_tokens: int, context: int) -> int:
    pages = -(-n_tokens // PAGE)
    return min(1 << (pages - 1).bit_length(), -(-context // PAGE))


def same(graphs: Model, direct: Model, steps: list[Tokens], series: list[object]) -> None:
    """Bit for bit the same, counts too; a step's graph is launched from the second time on that it is seen."""
    for step in steps:
        np.testing.assert_array_equal(run(graphs, step), run(direct, step))
    a, b = graphs.stats(), direct.stats()
    for name in ("n_tokens", "neurons_total", "neurons_active", "neurons_guessed"):
        assert getattr(a, name) == getattr(b, name), name
    assert b.device_graph_launches == 0
    assert a.device_graph_launches == sum(n - 1 for n in Counter(series).values())


@pytest.mark.parametrize("ffn", ["exact", "predicted", "dense"])
def test_decoding_over_growing_contexts(synth: Synth, ffn: str) -> None:
    """Single tokens around the places where a context of 5 pages takes its second, third and fifth page."""
    with both(synth("q4_0", shape=MINI.name), options(ffn, context=160)) as (graphs, direct):
        steps: list[Tokens] = []
        for before, n in ((28, 7), (26, 7), (58, 7)):
            steps += [(tokens(before), 0)] + [(tokens(1, i), 0) for i in range(n)]
        lengths = np.cumsum([len(step[0]) for step in steps])
        series = [
            page_bucket(int(length), 160)
            for length, step in zip(lengths, steps, strict=True)
            if len(step[0]) == 1
        ]
        assert sorted(set(series)) == [1, 2, 4, 5]
        same(graphs, direct, steps, series)


@pytest.mark.parametrize("ffn", ["exact", "predicted"])
@pytest.mark.parametrize("n_tokens", [2, 5, 16])
def test_steps_of_several_tokens(synth: Synth, ffn: str, n_tokens: int) -> None:
    with both(synth("f16", shape=MINI.name), options(ffn)) as (graphs, direct):
        steps: list[Tokens] = [(tokens(n_tokens, i), 0) for i in range(5)]
        # Position 0 is never masked, so in predicted mode the first step is a series of its own.
        series = [
            (page_bucket(n_tokens * (i + 1), 128), ffn == "predicted" and i == 0) for i in range(5)
        ]
        same(graphs, direct, steps, series)


def test_larger_steps_are_not_recorded(synth: Synth) -> None:
    with both(synth("f16", shape=MINI.name), options("dense")) as (graphs, direct):
        same(graphs, direct, [(tokens(17, i), 0) for i in range(3)], [])


def test_shapes_that_alternate(synth: Synth) -> None:
    """Single tokens of two sequences, both at once, and three of one, in turn."""
    asked = options("predicted", context=256, sequences=2)
    with both(synth("q8_0", shape=MINI.name), asked) as (graphs, direct):
        steps: list[Tokens] = [(tokens(40), 0), (tokens(40, 1), 1)]
        series: list[object] = []
        for i in range(3):
            some: list[Tokens] = [(tokens(1, i), 0), (tokens(2, i), [0, 1]), (tokens(1, i), 1)]
            steps += [*some, (tokens(3, i), 0)]
            series += ["one", "two", "one", "three"]
        same(graphs, direct, steps, series)


def test_some_rows_and_scores(synth: Synth) -> None:
    """The rows of the head are part of the series: none, neighbours, others."""
    with both(synth("f16", shape=MINI.name), options("exact")) as (graphs, direct):
        wanted = [[0, 0, 0, 1], [1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]]
        for rows in wanted * 2:
            for model in (graphs, direct):
                model.engine.run(Batch(tokens(4), want_logits=np.array(rows, bool)))
            np.testing.assert_array_equal(graphs.engine.logits(), direct.engine.logits())
        assert graphs.stats().device_graph_launches == len(wanted)
        text = tokens(12)
        np.testing.assert_array_equal(graphs.score(text), direct.score(text))


def test_the_least_recently_used_series_is_forgotten(synth: Synth) -> None:
    path = synth("f16", shape=NANO.name)
    with opened(path, options("dense", sequences=2)) as model:

        def launched(n_tokens: int, sequence: int) -> bool:
            before = model.stats().device_graph_launches
            model.engine.kv_truncate(sequence, 0)
            run(model, (tokens(n_tokens), sequence))
            return model.stats().device_graph_launches > before

        for n in range(1, MOST_SERIES + 1):
            assert [launched(n, 0), launched(n, 0)] == [False, True]
        assert launched(1, 0)
        model.engine.run(
            Batch(tokens(2))
        )  # without logits: the seventeenth series, in place of (2, logits)
        assert launched(1, 0)
        assert launched(3, 0)
        assert not launched(2, 0), "more series are kept than should be"


def test_replays_take_nothing(synth: Synth) -> None:
    n_steps = 10_000 if has_driver() else 200  # 40 ms each on the emulated device
    with opened(synth("f16", shape=NANO.name), options("exact", context=64)) as model:
        run(model, (tokens(8), 0))
        logits, stats = [], []
        for i in range(n_steps):
            model.engine.kv_truncate(0, 8)
            model.engine.run(Batch(tokens(1), want_logits=True))
            if i in (2, n_steps - 1):
                logits.append(model.engine.logits().copy())
                stats.append(model.stats())
        np.testing.assert_array_equal(*logits)
        assert stats[0].device_bytes == stats[1].device_bytes
        graphs = stats[1].device_graph_launches - stats[0].device_graph_launches
        assert graphs == n_steps - 3
        assert (stats[1].device_launches - stats[0].device_launches) % graphs == 0
