"""How the sides of a split layer meet: the ways to wait, sides that do not come, and the device's own operations."""

from __future__ import annotations

import ctypes as ct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from gpu.device import U32, Device, Merge, Post, Ptr, library_path
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
                asking(model, lambda asked=asked: next(asked, None) is None),
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


# ---- the device's operations ------------------------------------------------------------------------------


class Pinned:
    """Host memory that the device sees, as an array."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: type) -> None:
        host, self.address = Ptr(), Ptr()
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        device.allocate_host(n_bytes, 0, ct.byref(host), ct.byref(self.address))
        memory = (ct.c_uint8 * n_bytes).from_address(host.value or 0)
        self.array = np.frombuffer(memory, dtype).reshape(shape)
        self.array[:] = 0
        self.host = host


@pytest.fixture
def pinned(device: Device) -> Iterator[object]:
    made: list[Pinned] = []

    def make(shape: tuple[int, ...], dtype: type = np.float32) -> Pinned:
        made.append(Pinned(device, shape, dtype))
        return made[-1]

    yield make
    device.synchronize()
    for memory in made:
        device.release_host(memory.host)


WORDS = 3  # of a packet; the fourth is its value


def packets_for(n_words: int) -> int:
    return -(-n_words // WORDS)


def packed(words: np.ndarray, value: int) -> np.ndarray:
    """[n_rows, packets, 4] of 32-bit words [n_rows, n]."""
    n_packets = packets_for(words.shape[1])
    padded = np.zeros((len(words), n_packets * WORDS), np.uint32)
    padded[:, : words.shape[1]] = words
    out = np.full((len(words), n_packets, WORDS + 1), value, np.uint32)
    out[:, :, :WORDS] = padded.reshape(len(words), n_packets, WORDS)
    return out


def words_of(x: np.ndarray, halves: bool) -> np.ndarray:
    return x.astype(np.float16 if halves else np.float32).view(np.uint32)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("n_tokens", "masked"), [(1, True), (1, False), (5, True)])
def test_post(device: Device, pinned: object, n_tokens: int, masked: bool, halves: bool) -> None:
    rng = np.random.default_rng(0)
    n_embd, words, copied = 1540, 700, 601 if masked else 0
    x = rng.standard_normal((n_tokens, n_embd)).astype(np.float32)
    mask = rng.integers(0, 2**32, (n_tokens, words), dtype=np.uint32)
    x_packets = packets_for(n_embd // 2 if halves else n_embd)
    stride = x_packets + packets_for(copied) + 2
    out = pinned((n_tokens, stride, WORDS + 1), np.uint32)
    base = device.put(np.array([40], np.uint32))
    work = Post(base=base, order=2, n_tokens=n_tokens, n_embd=n_embd, halves=halves)
    work.x, work.mask = device.put(x), device.put(mask) + 4 * (words - copied)
    work.mask_words, work.mask_stride = copied, words
    work.out, work.out_stride = out.address, stride
    device.post(ct.byref(work))
    device.synchronize()
    np.testing.assert_array_equal(out.array[:, :x_packets], packed(words_of(x, halves), 42))
    handed = packed(mask[:, words - copied :], 42)
    np.testing.assert_array_equal(out.array[:, x_packets:-2], handed)
    assert (out.array[:, -2:] == 0).all()


class Merging:
    """A merge that waits for exchange 11."""

    def __init__(
        self,
        device: Device,
        pinned: object,
        shape: tuple[int, int],
        limit_ns: int = 10**10,
        halves: bool = False,
    ) -> None:
        rng = np.random.default_rng(1)
        n_tokens, n_embd = self.shape = shape
        self.device, self.halves = device, halves
        self.stride = packets_for(n_embd // 2 if halves else n_embd) + 1
        self.abandoned, self.late = pinned((1,), np.uint32), pinned((1,), np.uint32)
        self.answer = pinned((n_tokens, self.stride, WORDS + 1), np.uint32)
        self.gate = pinned((1,), np.uint32)
        self.given_up = device.put(np.zeros(1, np.uint32))
        self.x = [rng.standard_normal(shape).astype(np.float32) for _ in range(4)]
        if halves:
            self.x[3] = self.x[3].astype(np.float16).astype(np.float32)
        self.y = device.put(self.x[2])
        shares = (Ptr * 2)(device.put(self.x[0]), device.put(self.x[1]))
        self.work = Merge(
            base=device.put(np.array([10], np.uint32)), order=1, share=shares, y=self.y
        )
        self.work.n_tokens, self.work.n_embd, self.work.halves = n_tokens, n_embd, halves
        self.work.abandoned, self.work.late = self.abandoned.address, self.late.address
        self.work.given_up, self.work.answer = self.given_up, self.answer.address
        self.work.answer_stride, self.work.limit_ns = self.stride, limit_ns

    def give(self, value: int = 11) -> None:
        self.answer.array[:, :-1] = packed(words_of(self.x[3], self.halves), value)

    def sums(self) -> np.ndarray:
        return self.x[2] + ((self.x[0] + self.x[1]) + self.x[3])

    def run(self) -> np.ndarray:
        self.device.merge(ct.byref(self.work))
        return self.device.get(self.y, self.shape)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("shape", [(1, 1028), (3, 772)])
def test_merge_waits_for_the_answer(
    device: Device, pinned: object, shape: tuple[int, int], halves: bool
) -> None:
    merging = Merging(device, pinned, shape, halves=halves)
    merging.give(10)  # what an earlier exchange has left

    def answer() -> None:
        """A packet after the other, the last one late."""
        time.sleep(0.1)
        last = merging.answer.array[-1, -2].copy()
        merging.give()
        merging.answer.array[-1, -2] = last
        time.sleep(0.1)
        merging.give()

    cpu = threading.Thread(target=answer)
    cpu.start()
    got = merging.run()
    cpu.join()
    np.testing.assert_array_equal(got, merging.sums())
    assert merging.late.array[0] == 0


def test_merge_without_an_answer_waits_for_nobody(device: Device, pinned: object) -> None:
    merging = Merging(device, pinned, (1, 64))
    merging.work.answer = None
    merging.work.share[1] = None
    np.testing.assert_array_equal(merging.run(), merging.x[2] + merging.x[0])


@pytest.mark.parametrize("told", [True, False])
def test_merge_gives_up(device: Device, pinned: object, told: bool) -> None:
    """When it is told that nothing will come, or after its limit; later ones wait no more."""
    merging = Merging(device, pinned, (1, 64), limit_ns=10**10 if told else 2 * 10**8)
    merging.abandoned.array[0] = 1 if told else 0
    merging.give(3)
    begin = time.monotonic()
    np.testing.assert_array_equal(merging.run(), merging.x[2])
    assert (merging.late.array[0] == 11) == (not told)
    assert device.get(merging.given_up, 1, np.uint32) == 1
    merging.work.limit_ns = 10**10
    merging.abandoned.array[0] = 0
    np.testing.assert_array_equal(merging.run(), merging.x[2])
    assert time.monotonic() - begin < 5


def test_a_gate_holds_the_stream_back(device: Device, pinned: object) -> None:
    merging = Merging(device, pinned, (1, 64))
    merging.give()
    merging.work.gate = merging.gate.address
    device.merge(ct.byref(merging.work))
    busy = U32()
    device.query(ct.byref(busy))
    time.sleep(0.1)
    device.query(ct.byref(busy))
    assert busy.value == 1
    merging.gate.array[0] = 1
    got = device.get(merging.y, (1, 64))
    np.testing.assert_array_equal(got, merging.sums())
    device.query(ct.byref(busy))
    assert busy.value == 0


@pytest.mark.parametrize("n", [31, 32, 160, 4100])
def test_masks(device: Device, n: int) -> None:
    rng = np.random.default_rng(2)
    logits = rng.standard_normal((3, n)).astype(np.float32)
    logits[0, :5] = 0.25  # at the threshold: passes
    n_words = -(-n // 32)
    words = device.poisoned((3, n_words), np.uint32)
    device.mask(device.put(logits), 3, n, 0.25, words)
    got = device.get(words, (3, n_words), np.uint32)
    bits_of = np.unpackbits(got.view(np.uint8), axis=1, bitorder="little")
    np.testing.assert_array_equal(bits_of[:, :n] == 1, logits >= np.float32(0.25))
    assert (bits_of[:, n:] == 0).all()
