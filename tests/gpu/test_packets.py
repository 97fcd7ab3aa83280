"""What the sides of a split layer hand each other, against numpy: the device's operations."""

from __future__ import annotations

import ctypes as ct
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from gpu.device import U32, Device, Mask, Merge, Norm, Post, PostX, Ptr


class Pinned:
    """Host memory that the device sees, as an array."""

    def __init__(self, device: Device, shape: tuple[int, ...], dtype: type) -> None:
        host, self.address = Ptr(), Ptr()
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        device.allocate_host(n_bytes, ct.byref(host), ct.byref(self.address))
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


WORDS, ELEMENTS = 3, 6  # of a packet; its fourth word is the tag
STEP_BIAS, LARGEST = 127, 2**15 - 1
# Of the largest of six elements: half a step, or a whole one where the largest does not fit (pi_gpu_packet).
PACKET_ERROR = 2.0**-14


def rows_of_packets(x: np.ndarray, n_each: int) -> np.ndarray:
    """[n_rows, packets, n_each] of [n_rows, n], zeros behind."""
    n_packets = -(-x.shape[1] // n_each)
    padded = np.zeros((len(x), n_packets * n_each), x.dtype)
    padded[:, : x.shape[1]] = x
    return padded.reshape(len(x), n_packets, n_each)


def packed_words(words: np.ndarray, value: int) -> np.ndarray:
    """Packets [n_rows, packets, 4] of words of a mask [n_rows, n]."""
    packets = rows_of_packets(words, WORDS)
    tags = np.full((*packets.shape[:2], 1), value << 8, np.uint32)
    return np.concatenate([packets, tags], axis=2)


def packed(x: np.ndarray, value: int) -> np.ndarray:
    """Packets of finite elements [n_rows, n], in float64."""
    packets = rows_of_packets(x.astype(np.float64), ELEMENTS)
    largest = np.abs(packets).max(axis=2, keepdims=True)
    exponents = np.where(largest > 0, np.frexp(largest)[1], -STEP_BIAS)  # largest < 2^exponent
    steps = np.maximum(exponents - 15 + STEP_BIAS, 1)
    integers = np.rint(np.ldexp(packets, STEP_BIAS - steps))
    integers = np.minimum(integers, LARGEST).astype(np.int16)
    tags = (value << 8 | steps).astype(np.uint32)
    return np.concatenate([integers.view(np.uint32), tags], axis=2)


def unpacked(packets: np.ndarray, n: int) -> np.ndarray:
    """Elements [n_rows, n], in float64."""
    integers = np.ascontiguousarray(packets[:, :, :WORDS]).view(np.int16).astype(np.float64)
    steps = (packets[:, :, WORDS:] & 255).astype(np.int64)
    return np.ldexp(integers, steps - STEP_BIAS).reshape(len(packets), -1)[:, :n]


def posted(
    device: Device, pinned: object, x: np.ndarray, n_more: int = 0, norm: Norm | None = None
) -> np.ndarray:
    """Packets [n_tokens, packets + n_more, 4] that the device posts of x for exchange 42."""
    n_tokens, n_embd = x.shape
    stride = -(-n_embd // ELEMENTS) + n_more
    out = pinned((n_tokens, stride, WORDS + 1), np.uint32)
    base = device.put(np.array([40], np.uint32))
    post = Post(base=base, order=2, out_stride=stride, out=out.address)
    work = PostX(post=post, n_tokens=n_tokens, n_embd=n_embd, x=device.put(x), norm=norm or Norm())
    device.post(ct.byref(work))
    device.synchronize()
    return out.array


@pytest.mark.parametrize("n_tokens", [1, 5])
def test_post(device: Device, pinned: object, n_tokens: int) -> None:
    x = np.random.default_rng(0).standard_normal((n_tokens, 1540)).astype(np.float32)
    got = posted(device, pinned, x, 2)
    np.testing.assert_array_equal(got[:, :-2], packed(x, 42))
    assert (got[:, -2:] == 0).all()


@pytest.mark.parametrize("shape", [(1, 5120), (3, 96)])
def test_post_normalises(device: Device, pinned: object, shape: tuple[int, int]) -> None:
    """What is posted is what later kernels read; that is within the rounding of the sum of squares."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal(shape).astype(np.float32)
    gain = rng.uniform(0.5, 2, shape[1]).astype(np.float32)
    out = device.poisoned(shape)
    got = posted(device, pinned, x, norm=Norm(device.put(gain), 1e-5, out))
    normed = device.get(out, shape)
    np.testing.assert_array_equal(got, packed(normed, 42))
    squares = (x.astype(np.float64) ** 2).mean(axis=1, keepdims=True)
    # A thread adds up at most 80 squares, a block 7 levels more; then a root and two products.
    np.testing.assert_allclose(normed, x / np.sqrt(squares + 1e-5) * gain, rtol=100 * 2.0**-24)


def test_elements_of_any_size(device: Device, pinned: object) -> None:
    """Nothing overflows; what is small beside its neighbours is as exact as they are."""
    rng = np.random.default_rng(3)
    sizes = np.array([[1e-42, 1e-30, 1.0, 7e4, 1e30, 3e38]]).T
    x = (rng.uniform(-1, 1, (6, 600)) * sizes).astype(np.float32)
    x[2, :12] = [2 - 2**-20, -2, 0, -0.0, 2**-20, 1, *[0] * 6]
    got = posted(device, pinned, x)
    np.testing.assert_array_equal(got, packed(x, 42))
    largest = np.abs(rows_of_packets(x.astype(np.float64), ELEMENTS)).max(axis=2)
    limits = np.maximum(largest * PACKET_ERROR, 2.0**-126).repeat(ELEMENTS, axis=1)
    assert (np.abs(unpacked(got, 600) - x) <= limits).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_does_not_become_finite(
    device: Device, pinned: object, bad: float
) -> None:
    x = np.ones((1, 18), np.float32)
    x[0, 7] = bad
    got = posted(device, pinned, x)
    np.testing.assert_array_equal(got[0, :, WORDS], 42 << 8 | np.array([113, 255, 113]))
    merging = Merging(device, pinned, (1, 18))
    merging.give()
    merging.answer.array[0, :-1, :WORDS] = got[0, :, :WORDS]
    merging.answer.array[0, :-1, WORDS] = 11 << 8 | np.array([113, 255, 113])
    sums = merging.run()[0]
    assert not np.isfinite(sums[6:12]).any()
    assert np.isfinite(sums[[*range(6), *range(12, 18)]]).all()


class Merging:
    """A merge that waits for exchange 11."""

    def __init__(
        self,
        device: Device,
        pinned: object,
        shape: tuple[int, int],
        limit_ns: int = 10**10,
    ) -> None:
        rng = np.random.default_rng(1)
        n_tokens, n_embd = self.shape = shape
        self.device = device
        self.stride = -(-n_embd // ELEMENTS) + 1
        self.abandoned, self.late = pinned((1,), np.uint32), pinned((1,), np.uint32)
        self.answer = pinned((n_tokens, self.stride, WORDS + 1), np.uint32)
        self.gate = pinned((1,), np.uint32)
        self.given_up = device.put(np.zeros(1, np.uint32))
        self.x = [rng.standard_normal(shape).astype(np.float32) for _ in range(4)]
        self.x[3] = unpacked(packed(self.x[3], 0), n_embd).astype(np.float32)
        self.y = device.put(self.x[2])
        shares = (Ptr * 2)(device.put(self.x[0]), device.put(self.x[1]))
        self.work = Merge(
            base=device.put(np.array([10], np.uint32)), order=1, share=shares, y=self.y
        )
        self.work.n_tokens, self.work.n_embd = n_tokens, n_embd
        self.work.abandoned, self.work.late = self.abandoned.address, self.late.address
        self.work.given_up, self.work.answer = self.given_up, self.answer.address
        self.work.answer_stride, self.work.limit_ns = self.stride, limit_ns

    def give(self, value: int = 11) -> None:
        self.answer.array[:, :-1] = packed(self.x[3], value)

    def sums(self) -> np.ndarray:
        return self.x[2] + ((self.x[0] + self.x[1]) + self.x[3])

    def run(self) -> np.ndarray:
        self.device.merge(ct.byref(self.work))
        return self.device.get(self.y, self.shape)


@pytest.mark.parametrize("shape", [(1, 1028), (3, 772)])
def test_merge_waits_for_the_answer(device: Device, pinned: object, shape: tuple[int, int]) -> None:
    merging = Merging(device, pinned, shape)
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
    work = Mask(None, device.put(logits), 3, n, 0.25, 0, words, Post())
    device.mask(ct.byref(work))
    got = device.get(words, (3, n_words), np.uint32)
    bits_of = np.unpackbits(got.view(np.uint8), axis=1, bitorder="little")
    np.testing.assert_array_equal(bits_of[:, :n] == 1, logits >= np.float32(0.25))
    assert (bits_of[:, n:] == 0).all()


@pytest.mark.parametrize(("n", "first"), [(32, 0), (1000, 5), (4100, 12), (4100, 128), (13824, 97)])
def test_masks_are_posted(device: Device, pinned: object, n: int, first: int) -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((2, n)).astype(np.float32)
    n_words = -(-n // 32)
    words = device.poisoned((2, n_words), np.uint32)
    stride = -(-(n_words - first) // WORDS) + 1
    out = pinned((2, stride, WORDS + 1), np.uint32)
    post = Post(device.put(np.array([40], np.uint32)), 2, stride, out.address, None)
    device.mask(ct.byref(Mask(None, device.put(logits), 2, n, 0.5, first, words, post)))
    got = device.get(words, (2, n_words), np.uint32)
    bits = np.packbits(np.pad(logits >= 0.5, ((0, 0), (0, -n % 32))), axis=1, bitorder="little")
    np.testing.assert_array_equal(got, bits.view(np.uint32))
    np.testing.assert_array_equal(out.array[:, :-1], packed_words(got[:, first:], 42))
    assert (out.array[:, -1:] == 0).all()
