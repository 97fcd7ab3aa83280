"""How the sides of a split layer meet: the ways to wait, and sides that do not come."""

from __future__ import annotations

import ctypes as ct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gpu.device import library_path
from gpu.hybrid import CPU_LAYER, SMALL, opened, options, small_file
from gpu.models import has_driver
from parity.steps import bits, run_chunks
from powerinfer_toolkit.errors import ExitCode, PiError
from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.engine import Batch
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.plan.plan import HandOver

N = SMALL.n_ff
RANGES = ((64, 64), (32, 96), (0, N))  # the last layer needs nothing of the CPU
TOKENS = np.random.default_rng(7).integers(3, SMALL.n_vocab, 12)
ONE_MORE = Batch([5], want_logits=True)  # as the single tokens before it, so that it replays
LIMIT_S = 5  # that a side waits for the other

# The emulated device can be told to misbehave; their names keep these tests out of `make gpu-test`.
emulated_only = pytest.mark.skipif(has_driver(), reason="only the emulated device")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, device_library: None) -> Path:
    return small_file(tmp_path_factory.mktemp("handover") / "small.gguf")


def emulator() -> ct.CDLL:
    return ct.CDLL(str(library_path("gpu_emulated")))


@pytest.fixture
def display() -> Iterator[None]:
    """A device on which a display hangs."""
    emulator().emulator_display(1)
    yield
    emulator().emulator_display(0)


@contextmanager
def asking(model: Model, interrupted: Callable[[], bool]) -> Iterator[None]:
    """Steps of the model ask whether they are to end."""
    callback = native_lib.AbortFn(lambda _user: int(interrupted()))
    library = native_lib.load()
    library.pi_engine_set_abort(model.engine.handle, callback, None)
    try:
        yield
    finally:
        library.pi_engine_set_abort(model.engine.handle, native_lib.AbortFn(), None)


def answer_late(aborted: bool) -> bool:
    """So that the next question comes in the same step."""
    time.sleep(0.03)
    return aborted


def decoded(model: Model) -> np.ndarray:
    """Logits of single tokens: the first step is queued, the second recorded, the others replayed."""
    run_chunks(model, TOKENS[:6], 6)
    return run_chunks(model, TOKENS[6:], 1)


@pytest.mark.parametrize("ffn", ["exact", "predicted"])
def test_every_way_gives_the_same_bits(path: Path, ffn: str) -> None:
    seen = set()
    for way in (HandOver.EVENT, HandOver.SPIN, HandOver.WAIT_VALUE):
        with opened(path, options(ffn), RANGES, handover=way) as model:
            seen.add(bits(decoded(model)))
            stats = model.stats()
            assert stats.handover == way
            n_decoded = len(TOKENS) - 6
            if way is not HandOver.EVENT:
                assert stats.device_graph_launches == n_decoded - 1
            assert stats.pinned_bytes > 0
    assert len(seen) == 1


def test_whole_layers_have_none(path: Path) -> None:
    with opened(path, options("exact"), ((N, N), (N, N), (N, N)), handover=HandOver.SPIN) as model:
        assert model.stats().handover == HandOver.AUTO


@emulated_only
def test_a_display_is_not_made_to_wait_emulated(path: Path, display: None) -> None:
    with opened(path, options("exact"), RANGES) as model:
        assert model.stats().handover == HandOver.EVENT
    with pytest.raises(PiError, match="a display depends on this GPU"):
        opened(path, options("exact"), RANGES, handover=HandOver.SPIN)


@emulated_only
def test_without_a_display_kernels_wait_emulated(path: Path) -> None:
    with opened(path, options("exact"), RANGES) as model:
        assert model.stats().handover == HandOver.SPIN


@pytest.mark.parametrize("way", [HandOver.SPIN, HandOver.WAIT_VALUE, HandOver.EVENT])
def test_a_step_that_is_aborted_leaves_the_engine_whole(path: Path, way: HandOver) -> None:
    """Also in the middle of a replayed graph, whose kernels then wait for nobody."""
    with opened(path, options("exact"), RANGES, handover=way) as model:
        want = bits(decoded(model))
        for n_asked in (1, 2):
            asked = iter(range(n_asked))
            with (
                asking(model, lambda asked=asked: answer_late(next(asked, None) is None)),
                pytest.raises(PiError) as failure,
            ):
                model.engine.run(ONE_MORE)
            assert failure.value.exit_code == ExitCode.INTERRUPTED
        model.engine.kv_truncate(0, 0)
        assert bits(decoded(model)) == want


def test_a_cpu_that_never_answers_is_an_error(path: Path) -> None:
    """The CPU is kept busy by its abort callback, which it asks while it waits for a post."""
    with opened(path, options("exact"), RANGES, handover=HandOver.SPIN) as model:
        decoded(model)
        pauses = iter([0, LIMIT_S + 1.5])
        with (
            asking(model, lambda: time.sleep(next(pauses, 0)) is not None),
            pytest.raises(PiError, match=r"layer \d: the GPU has waited for the CPU"),
        ):
            model.engine.run(ONE_MORE)
        model.engine.run(ONE_MORE)  # the engine is whole
        assert np.isfinite(model.engine.logits()).all()


@emulated_only
@pytest.mark.parametrize("way", [HandOver.SPIN, HandOver.EVENT])
def test_a_device_that_posts_nothing_is_an_error_emulated(path: Path, way: HandOver) -> None:
    with opened(path, options("exact"), RANGES, handover=way) as model:
        decoded(model)
        begin = time.monotonic()
        try:
            # From when the step is described to the device on.
            with (
                asking(model, lambda: emulator().emulator_stall(1) and False),
                pytest.raises(PiError, match="layer 0: the GPU has handed nothing over for 5 s"),
            ):
                model.engine.run(ONE_MORE)
            assert time.monotonic() - begin < LIMIT_S + 2
            with pytest.raises(PiError, match="did not come back from an earlier step"):
                model.engine.run(ONE_MORE)
        finally:
            emulator().emulator_stall(0)


@pytest.mark.parametrize("way", [HandOver.SPIN, HandOver.EVENT])
def test_layers_are_timed(path: Path, way: HandOver) -> None:
    """What each side did; steps are the same with and without."""
    ranges = (CPU_LAYER, (32, 96), (0, N))
    with opened(path, options("predicted"), ranges, handover=way) as model:
        want = bits(decoded(model))
        assert all(times.n_steps == 0 for times in model.engine.layer_times())
        model.engine.time_layers(True)
        model.engine.kv_truncate(0, 0)
        begin = time.perf_counter_ns()
        assert bits(decoded(model)) == want
        took = time.perf_counter_ns() - begin
        on_cpu, split, pulled = model.engine.layer_times()
        assert {times.n_steps for times in (on_cpu, split, pulled)} == {1 + len(TOKENS) - 6}
        assert on_cpu.cpu_ns > 0
        assert on_cpu.gpu_ns + on_cpu.cpu_wait_ns + on_cpu.gpu_wait_ns == 0
        assert min(split.cpu_ns, split.cpu_wait_ns, split.gpu_ns, split.pull_ns) > 0
        assert split.gpu_wait_ns >= split.handover_ns
        assert pulled.cpu_ns + pulled.cpu_wait_ns + pulled.handover_ns == 0
        assert pulled.pull_ns > 0
        for times in (on_cpu, split, pulled):
            assert times.gpu_ns + times.pull_ns + times.gpu_wait_ns < took
            assert times.cpu_ns + times.cpu_wait_ns < took
        model.engine.time_layers(False)
        model.engine.kv_truncate(0, 0)
        assert bits(decoded(model)) == want
        assert all(times.n_steps == 0 for times in model.engine.layer_times())
