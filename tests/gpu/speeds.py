"""How fast the device library's operations are, beside the bytes they read: `make gpu-speeds`.

Weights rotate among matrices that together exceed the cache. Every time is that of one operation within a graph of
many, best of three launches: what it costs in a step, the gap between two kernels included.
"""

from __future__ import annotations

import ctypes as ct
import sys
import time
from collections.abc import Callable

import numpy as np

from gpu.blocks import random_rows
from gpu.device import (
    Attention,
    Device,
    Kv,
    Neurons,
    Norm,
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


def matrices(device: Device, kind: str, n_rows: int, n_cols: int) -> tuple[list[Rows], int]:
    """Copies of a matrix that do not fit the cache together, and the bytes of one."""
    few = random_rows(kind, 64, n_cols, seed=1)
    data = np.tile(few, (n_rows // 64, 1))
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
                rows[i % len(rows)], rows[(i + 1) % len(rows)], x, None, mask, 0, 0, None, None, out
            )
            device.neurons(ct.byref(work))

        def sums(i: int, h: int = h) -> None:
            device.multiply_transposed(ct.byref(rows[i % len(rows)]), h, 1, 0, out)

        for name, work, n in (("gates and ups", both, 2), ("sums of rows", sums, 1)):
            us = best_us(device, work)
            print(
                f"{kind:7} {name:13} of {share:4.0%} {us:9.1f} us {n * n_bytes * share / us / 1e3:7.0f} GB/s"
            )


def attention_work(device: Device, n_tokens: int, length: int, n_kv_heads: int) -> Attention:
    """The last n_tokens of a sequence of this length, 32 heads of 128."""
    n_heads, head_dim = N_EMBD // HEAD_DIM, HEAD_DIM
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


class Token:
    """One layer's operations of a token of a 7B model, as the engine queues them; density: open gates, 0 to 1."""

    def __init__(self, device: Device, kind: str, density: float, length: int) -> None:
        self.device = device
        self.square, self.square_bytes = matrices(device, kind, N_EMBD, N_EMBD)
        self.wide, self.wide_bytes = matrices(device, kind, N_FF, N_EMBD)
        self.head, self.head_bytes = matrices(device, kind, N_VOCAB, N_EMBD)
        self.x = device.put(np.random.default_rng(0).standard_normal(N_EMBD, np.float32))
        self.q, self.k, self.v = (device.empty(4 * N_EMBD) for _ in range(3))
        device.zero(self.v, 4 * N_EMBD)
        self.logits, self.residual = device.empty(4 * N_VOCAB), device.empty(4 * N_EMBD)
        self.norm = Norm(self.x, 1e-5, None)
        chosen = np.random.default_rng(1).random(N_FF) < density
        self.mask = device.put(np.packbits(chosen, bitorder="little").view(np.uint32))
        self.h, self.out = device.put(chosen.astype(np.float32)), device.empty(4 * N_FF)
        self.density = float(chosen.mean())
        self.work = attention_work(device, 1, length, N_EMBD // HEAD_DIM)
        half = device.put(np.ones(64, np.float32))
        self.rope = Rope(N_EMBD // HEAD_DIM, HEAD_DIM, half, half)

    def rows(self, of: list[Rows], i: int) -> Rows:
        return of[i % len(of)]

    def products(self, i: int) -> None:
        outs = (self.q, self.k, self.v)
        rows = [self.rows(self.square, 3 * i + j) for j in range(3)]
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

    def neurons(self, i: int) -> None:
        pair = self.rows(self.wide, 2 * i), self.rows(self.wide, 2 * i + 1)
        norm = ct.pointer(self.norm)
        work = Neurons(*pair, self.x, norm, self.mask, 0, 0, None, None, self.out)
        self.device.neurons(ct.byref(work))

    def down(self, i: int) -> None:
        rows = ct.byref(self.rows(self.wide, i))
        self.device.multiply_transposed(rows, self.h, 1, 1, self.residual)

    def last(self, i: int) -> None:
        product = Product(self.rows(self.head, i), None, self.logits, 0, 0)
        self.device.multiply(ct.byref(product), 1, self.x, 1, ct.byref(self.norm))


def token(device: Device, kind: str, density: float, length: int) -> None:
    """Shares of a token's time: each operation alone, a layer as it is, 32 layers and the head."""
    of = Token(device, kind, density, length)
    kv_bytes = of.work.kv.page_bytes * of.work.step.most_pages
    parts = {
        "q, k, v": (of.products, 3 * of.square_bytes),
        "place heads": (of.place, 0),
        "attention": (of.attend, kv_bytes),
        "its output": (of.output, of.square_bytes),
        "gates and ups": (of.neurons, int(2 * of.wide_bytes * of.density)),
        "down": (of.down, int(of.wide_bytes * of.density)),
    }

    def layer(i: int) -> None:
        for work, _ in parts.values():
            work(i)

    us = {name: best_us(device, work, 64) for name, (work, _) in parts.items()}
    whole, head = best_us(device, layer, 32), best_us(device, of.last, 32)
    print(f"a token of 7B in {kind}, {of.density:.0%} of the neurons, after {length} others:")
    for name, (_, n_bytes) in parts.items():
        rate = f"{n_bytes / us[name] / 1e3:6.0f} GB/s" if n_bytes else ""
        print(
            f"  {name:14} {us[name]:7.1f} us {us[name] / sum(us.values()):4.0%} of a layer {rate}"
        )
    print(f"  {'head':14} {head:7.1f} us {of.head_bytes / head / 1e3:24.0f} GB/s")
    n_bytes = 32 * sum(n for _, n in parts.values()) + of.head_bytes
    total = 32 * whole + head
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
    tokens = (("Q4_0", 1.0), ("Q4_0", 0.1), ("F16", 1.0))
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
        "tokens": [lambda d, c=c: token(d, *c, 512) for c in tokens],
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
