"""How fast the device library's operations are, beside the bytes they read: `make gpu-speeds`.

Weights rotate among matrices that together exceed the cache. Every time is that of one operation within a graph of
many, best of three launches: what it costs in a step, the gap between two kernels included.
"""

from __future__ import annotations

import ctypes as ct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpu.blocks import random_rows
from gpu.device import (
    Attention,
    Device,
    Kv,
    Neurons,
    Norm,
    Predictor,
    Product,
    Ptr,
    Rope,
    Rows,
    Step,
    opened,
)

N_EMBD, N_FF, N_VOCAB, HEAD_DIM = 4096, 11_008, 32_000, 128  # of a 7B Llama
CACHE_BYTES = 256 << 20


def best_us(device: Device, work: Callable[[int], None], n: int = 100) -> float:
    """Microseconds of one call of work(i), of a graph of n of them."""
    graph = Ptr()
    work(0)  # scratch that it takes
    device.synchronize()
    device.begin_capture()
    for i in range(n):
        work(i)
    device.end_capture(ct.byref(graph))
    times = []
    for _ in range(4):  # the first one warms up
        device.synchronize()
        start = time.perf_counter()
        device.launch_graph(graph)
        device.synchronize()
        times.append((time.perf_counter() - start) / n * 1e6)
    device.release_graph(graph)
    return min(times[1:])


def matrices(
    device: Device, kind: str, n_rows: int, n_cols: int, n_different: int = 32
) -> tuple[list[Rows], int]:
    """Copies of a matrix that do not fit the cache together, and the bytes of one; its rows repeat."""
    few = random_rows(kind, n_different, n_cols, seed=1)
    data = np.tile(few, (n_rows // n_different, 1))
    n = max(2, CACHE_BYTES // data.nbytes + 1)
    return [device.rows(kind, data, n_cols) for _ in range(n)], data.nbytes


def products(device: Device, kind: str) -> None:
    rows, n_bytes = matrices(device, kind, N_FF, N_EMBD)
    for n_tokens in (1, 2, 4, 8, 16, 128, 512):
        x = device.put(np.random.default_rng(0).standard_normal((n_tokens, N_EMBD), np.float32))
        out = device.empty(n_tokens * N_FF * 4)

        def work(i: int, n_tokens: int = n_tokens, x: int = x, out: int = out) -> None:
            product = Product(rows[i % len(rows)], None, out, 0, 0)
            device.multiply(ct.byref(product), 1, x, n_tokens, None)

        us = best_us(device, work, 30 if n_tokens > 16 else 100)
        flops = 2 * n_tokens * N_FF * N_EMBD / us / 1e6
        print(
            f"{kind:7} {n_tokens:4} tokens {us:9.1f} us {n_bytes / us / 1e3:7.0f} GB/s {flops:7.1f} TFLOP/s"
        )


def neurons(device: Device, kind: str) -> None:
    """A token's gates and ups with a mask, then the sum of the rows of those that fire."""
    rows, n_bytes = matrices(device, kind, N_FF, N_EMBD)
    x, out = device.put(np.ones(N_EMBD, np.float32)), device.empty(4 * N_FF)
    for share in (1.0, 0.1):
        chosen = np.random.default_rng(0).random(N_FF) < share
        mask = device.put(np.packbits(chosen, bitorder="little").view(np.uint32))
        h = device.put(chosen.astype(np.float32))

        def both(i: int, mask: int = mask) -> None:
            work = Neurons(
                *(rows[i % len(rows)], rows[(i + 1) % len(rows)], x, None, mask, None),
                *(0, 0, None, None, out),
            )
            device.neurons(ct.byref(work))

        def sums(i: int, h: int = h) -> None:
            device.multiply_transposed(ct.byref(rows[i % len(rows)]), h, 1, 0, out)

        for name, work, n in (("gates and ups", both, 2), ("sums of rows", sums, 1)):
            us = best_us(device, work)
            print(
                f"{kind:7} {name:13} of {share:4.0%} {us:9.1f} us {n * n_bytes * share / us / 1e3:7.0f} GB/s"
            )


def attention_work(
    device: Device,
    n_tokens: int,
    length: int,
    n_kv_heads: int,
    n_heads: int = N_EMBD // HEAD_DIM,
    n_embd: int = N_EMBD,
) -> Attention:
    """The last n_tokens of a sequence of this length."""
    head_dim = n_embd // n_heads
    n_pages = -(-length // 32)
    page_bytes = n_kv_heads * 2 * head_dim * 32 * 2
    kv = Kv(device.empty(page_bytes * n_pages), page_bytes, 1, n_kv_heads, head_dim)
    device.zero(kv.base, page_bytes * n_pages)
    slots = np.arange(length - n_tokens, length, dtype=np.uint32)
    zeros = device.put(np.zeros(n_tokens, np.uint32))
    step = Step(
        *(n_tokens, n_pages, device.put(np.arange(n_pages, dtype=np.uint32)), zeros),
        *(device.put(slots), zeros, zeros, None, 0, n_pages),
    )
    q = device.put(np.ones((n_tokens, n_heads, head_dim), np.float32))
    work = Attention(kv, step, n_heads, q, device.empty(n_tokens * n_heads * head_dim * 4), None)
    tiles = [(i, min(i + 64, n_tokens)) for i in range(0, n_tokens, 64)]
    work.tiles, work.n_tiles = device.put(np.array(tiles, np.uint32)), len(tiles)
    return work


def attention(device: Device, n_tokens: int, length: int, n_kv_heads: int) -> None:
    work = attention_work(device, n_tokens, length, n_kv_heads)
    us = best_us(device, lambda _: device.attend(ct.byref(work)), 50)
    n_bytes = work.kv.page_bytes * work.step.most_pages
    print(
        f"attention {n_tokens:4} tokens over {length:5}, {n_kv_heads:2} KV heads {us:9.1f} us "
        f"{n_bytes / us / 1e3:7.0f} GB/s"
    )


def rates(device: Device) -> None:
    """What a kernel that only reads reaches."""
    for name, from_host, n_bytes in (("device", 0, 1 << 30), ("mapped host", 1, 256 << 20)):
        rate = ct.c_uint64()
        device.measure_read(from_host, n_bytes, 0.1, ct.byref(rate))
        print(f"reading {name} memory {rate.value / 1e9:8.1f} GB/s")


def small(device: Device) -> None:
    x, out = device.put(np.ones(N_FF, np.float32)), device.empty(4 * N_FF)
    us = best_us(device, lambda _: device.rms_norm(x, x, 1, N_EMBD, 1e-5, out), 300)
    print(f"{'rms_norm':21} {us:7.1f} us")
    for n_vocab in (N_VOCAB, 152_064):
        logits = device.put(np.random.default_rng(0).standard_normal(n_vocab, np.float32))
        for n_top in (1, 64, 128, 256):
            us = best_us(device, lambda _: device.top(logits, 1, n_vocab, n_top, out), 300)  # noqa: B023 - called here
            print(f"top {n_top:3} of {n_vocab:9,} {us:7.1f} us")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, its predictors' rank among them."""

    name: str
    n_embd: int
    n_ff: int
    n_heads: int
    n_kv_heads: int
    n_vocab: int
    n_layers: int
    rank: int

    @property
    def n_kv(self) -> int:
        return self.n_embd // self.n_heads * self.n_kv_heads


SHAPES = {
    "7b": Shape("7b", N_EMBD, N_FF, 32, 32, N_VOCAB, 32, 704),
    "135m": Shape("135m", 576, 1536, 9, 3, 49_152, 30, 96),
}


class Token:
    """One layer's operations of a token of a model, as the engine queues them; density: open gates, 0 to 1."""

    def __init__(
        self, device: Device, shape: Shape, kind: str, density: float, length: int
    ) -> None:
        self.device, self.shape = device, shape
        n_embd, n_ff = shape.n_embd, shape.n_ff
        self.square, self.square_bytes = matrices(device, kind, n_embd, n_embd)
        self.kv, kv_bytes = matrices(device, kind, shape.n_kv, n_embd)
        self.qkv_bytes = self.square_bytes + 2 * kv_bytes
        self.wide, self.wide_bytes = matrices(device, kind, n_ff, n_embd)
        self.head, self.head_bytes = matrices(device, kind, shape.n_vocab, n_embd)
        self.fc1, self.fc1_bytes = matrices(device, "Q8_0", shape.rank, n_embd)
        of_fc2 = "Q5_0" if kind == "Q4_0" else "Q8_0"
        self.fc2, self.fc2_bytes = matrices(device, of_fc2, n_ff, shape.rank, n_ff)
        self.x = device.put(np.random.default_rng(0).standard_normal(n_embd, np.float32))
        self.q, self.k, self.v, self.hidden, self.logits = (
            device.empty(4 * max(n, n_ff))
            for n in (n_embd, shape.n_kv, shape.n_kv, shape.rank, shape.n_vocab)
        )
        device.zero(self.v, 4 * n_embd)
        self.residual = device.empty(4 * n_embd)
        self.norm = Norm(self.x, 1e-5, None)
        chosen = np.random.default_rng(1).random(n_ff) < density
        self.mask = device.put(np.packbits(chosen, bitorder="little").view(np.uint32))
        self.h, self.out = device.put(chosen.astype(np.float32)), device.empty(4 * n_ff)
        self.density = float(chosen.mean())
        self.work = attention_work(device, 1, length, shape.n_kv_heads, shape.n_heads, n_embd)
        half = device.put(np.ones(64, np.float32))
        self.rope = Rope(shape.n_heads, n_embd // shape.n_heads, half, half)
        self.threshold = self.threshold_of(density)

    def threshold_of(self, density: float) -> float:
        """The logit that this share of the neurons is above, where all fc2 are the same."""
        self.predict(0)
        product = Product(self.fc2[0], None, self.logits, 0, 0)
        self.device.multiply(ct.byref(product), 1, self.hidden, 1, None)
        logits = self.device.get(self.logits, self.shape.n_ff)
        return float(np.quantile(logits, 1 - density))

    def rows(self, of: list[Rows], i: int) -> Rows:
        return of[i % len(of)]

    def products(self, i: int) -> None:
        outs = (self.q, self.k, self.v)
        rows = [
            self.rows(self.square, i),
            *(self.rows(self.kv, 2 * i + j) for j in range(2)),
        ]
        three = (Product * 3)(*(Product(r, None, o, 0, 0) for r, o in zip(rows, outs, strict=True)))
        self.device.multiply(three, 3, self.x, 1, ct.byref(self.norm))

    def place(self, _: int) -> None:
        kv, step = ct.byref(self.work.kv), ct.byref(self.work.step)
        self.device.place_heads(kv, step, ct.byref(self.rope), self.q, self.k, self.v)

    def attend(self, _: int) -> None:
        self.device.attend(ct.byref(self.work))

    def output(self, i: int) -> None:
        product = Product(self.rows(self.square, i), None, self.residual, 1, 0)
        self.device.multiply(ct.byref(product), 1, self.x, 1, None)

    def predict(self, i: int) -> None:
        product = Product(self.rows(self.fc1, i), None, self.hidden, 0, 1)
        self.device.multiply(ct.byref(product), 1, self.x, 1, None)

    def neurons(self, i: int, predictor: Predictor | None = None) -> None:
        pair = self.rows(self.wide, 2 * i), self.rows(self.wide, 2 * i + 1)
        chosen = (self.mask, None) if predictor is None else (None, ct.pointer(predictor))
        norm = ct.pointer(self.norm)
        work = Neurons(*pair, self.x, norm, *chosen, 0, 0, None, None, self.out)
        self.device.neurons(ct.byref(work))

    def predicted_neurons(self, i: int) -> None:
        fc2 = self.rows(self.fc2, i)
        self.neurons(i, Predictor(fc2, self.hidden, self.threshold, self.logits, None))

    def down(self, i: int) -> None:
        rows = ct.byref(self.rows(self.wide, i))
        self.device.multiply_transposed(rows, self.h, 1, 1, self.residual)

    def last(self, i: int) -> None:
        product = Product(self.rows(self.head, i), None, self.logits, 0, 0)
        self.device.multiply(ct.byref(product), 1, self.x, 1, ct.byref(self.norm))

    def parts(self, predicted: bool) -> dict[str, tuple[Callable[[int], None], int]]:
        """A layer's operations and the bytes of weights or cache that each reads."""
        of_neurons = int(2 * self.wide_bytes * self.density)
        attention: dict[str, tuple[Callable[[int], None], int]] = {
            "q, k, v": (self.products, self.qkv_bytes),
            "place heads": (self.place, 0),
            "attention": (self.attend, self.work.kv.page_bytes * self.work.step.most_pages),
            "its output": (self.output, self.square_bytes),
        }
        if predicted:
            attention["predictor"] = (self.predict, self.fc1_bytes)
            neurons = (self.predicted_neurons, self.fc2_bytes + of_neurons)
        else:
            neurons = (self.neurons, of_neurons)
        down = (self.down, int(self.wide_bytes * self.density))
        return {**attention, "gates and ups": neurons, "down": down}


def token(
    device: Device, name: str, kind: str, density: float, length: int, predicted: bool = False
) -> None:
    """Shares of a token's time: each operation alone, a layer as it is, all layers and the head."""
    shape = SHAPES[name]
    of = Token(device, shape, kind, density, length)
    parts = of.parts(predicted)

    def layer(i: int) -> None:
        for work, _ in parts.values():
            work(i)

    us = {name: best_us(device, work, 64) for name, (work, _) in parts.items()}
    whole, head = best_us(device, layer, 32), best_us(device, of.last, 32)
    by = ", predicted" if predicted else ""
    print(
        f"a token of {name} in {kind}, {of.density:.0%} of the neurons{by}, after {length} others:"
    )
    for part, (_, n_bytes) in parts.items():
        rate = f"{n_bytes / us[part] / 1e3:6.0f} GB/s" if n_bytes else ""
        print(
            f"  {part:14} {us[part]:7.1f} us {us[part] / sum(us.values()):4.0%} of a layer {rate}"
        )
    print(f"  {'head':14} {head:7.1f} us {of.head_bytes / head / 1e3:24.0f} GB/s")
    n_bytes = shape.n_layers * sum(n for _, n in parts.values()) + of.head_bytes
    total = shape.n_layers * whole + head
    print(
        f"  a layer {whole:.1f} us (alone: {sum(us.values()):.1f}); the token {total:.0f} us, {1e6 / total:.0f} tok/s"
    )
    print(f"  at {n_bytes / total / 1e3:.0f} GB/s of what it reads")


def transposed(device: Device, kind: str) -> None:
    """What a prompt's down takes, from rows of down_t."""
    rows, _ = matrices(device, kind, N_FF, N_EMBD)
    out = device.empty(512 * N_EMBD * 4)
    for n_tokens in (128, 512):
        h = device.put(np.random.default_rng(0).standard_normal((n_tokens, N_FF), np.float32))

        def work(i: int, n_tokens: int = n_tokens, h: int = h) -> None:
            device.multiply_transposed(ct.byref(rows[i % len(rows)]), h, n_tokens, 0, out)

        us = best_us(device, work, 30)
        rate = 2 * n_tokens * N_FF * N_EMBD / us / 1e6
        print(f"{kind:7} {n_tokens:4} tokens, transposed {us:9.1f} us {rate:7.1f} TFLOP/s")


Case = Callable[[Device], None]


def cases() -> dict[str, list[Case]]:
    """Each group of cases by its name."""
    tokens = (
        *(("7b", "Q4_0", 1.0, 512), ("7b", "Q4_0", 0.1, 512), ("7b", "Q4_0", 0.1, 512, True)),
        ("7b", "F16", 1.0, 512),
    )
    small_tokens = (("135m", "Q8_0", 0.1, 64), ("135m", "Q8_0", 0.1, 64, True))
    lengths = ((1, 128, 32), (1, 512, 32), (1, 4096, 32), (1, 4096, 8))
    prompts = ((512, 512, 32), (512, 4096, 32))
    of_kind: dict[str, tuple[Callable[[Device, str], None], tuple[str, ...]]] = {
        "products": (products, ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")),
        "transposed": (transposed, ("F16", "Q4_0")),
        "neurons": (neurons, ("F16", "Q4_0")),
    }
    return {
        "rates": [rates],
        "small": [small],
        "tokens": [lambda d, c=c: token(d, *c) for c in tokens],
        "small tokens": [lambda d, c=c: token(d, *c) for c in small_tokens],
        **{
            name: [lambda d, w=work, k=kind: w(d, k) for kind in kinds]
            for name, (work, kinds) in of_kind.items()
        },
        "attention": [lambda d, s=s: attention(d, *s) for s in (*lengths, *prompts)],
    }


def main() -> None:
    """Print one line a case: speeds.py [LIBRARY [GROUP ...]], all groups without names."""
    name, *wanted = sys.argv[1:] or ["cuda"]
    with opened(name) as device:
        info = device.info_now()
        print(f"{info.name.decode()}, context {info.context_bytes >> 20} MiB")
        device.reserve(16 << 20, 64 << 20, 64 << 20, 512 << 20)
        groups = cases()
        for case in (c for group in wanted or groups for c in groups[group]):
            case(device)
            device.release_all()


if __name__ == "__main__":
    main()
