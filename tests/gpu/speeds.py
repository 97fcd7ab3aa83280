"""How fast the device library's operations are, beside the bytes they read: `make gpu-speeds`.

Weights rotate among matrices that together exceed the cache. Times are the best of three runs of many launches, the
calls through ctypes included (about 3 us, which bounds the smallest ones).
"""

from __future__ import annotations

import ctypes as ct
import sys
import time
from collections.abc import Callable

import numpy as np

from gpu.blocks import random_rows
from gpu.device import Attention, Device, Kv, Neurons, Product, Rows, Step, opened

N_EMBD, N_FF = 4096, 11_008  # of a 7B Llama
CACHE_BYTES = 256 << 20


def best_us(device: Device, work: Callable[[int], None], n: int = 100) -> float:
    """Microseconds of one call of work(i)."""
    times = []
    for _ in range(4):  # the first one warms up
        device.synchronize()
        start = time.perf_counter()
        for i in range(n):
            work(i)
        device.synchronize()
        times.append((time.perf_counter() - start) / n * 1e6)
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


def attention(device: Device, n_tokens: int, length: int, n_kv_heads: int) -> None:
    n_heads, head_dim = 32, 128
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
    us = best_us(device, lambda _: device.attend(ct.byref(work)), 50)
    n_bytes = page_bytes * n_pages
    print(
        f"attention {n_tokens:4} tokens over {length:5}, {n_kv_heads:2} KV heads {us:9.1f} us "
        f"{n_bytes / us / 1e3:7.0f} GB/s"
    )


def small(device: Device) -> None:
    x, out = device.put(np.ones(N_FF, np.float32)), device.empty(4 * N_FF)
    operations = {
        "rms_norm": lambda _: device.rms_norm(x, x, 1, N_EMBD, 1e-5, out),
        "add": lambda _: device.add(x, N_EMBD, out),
    }
    for name, work in operations.items():
        print(f"{name:10} {best_us(device, work, 300):7.1f} us")


def main() -> None:
    """Print one line a case."""
    with opened(sys.argv[1] if len(sys.argv) > 1 else "cuda") as device:
        info = device.info_now()
        print(f"{info.name.decode()}, context {info.context_bytes >> 20} MiB")
        cases: list[Callable[[], None]] = [lambda: small(device)]
        cases += [
            lambda k=kind: products(device, k) for kind in ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
        ]
        cases += [lambda k=kind: neurons(device, k) for kind in ("F16", "Q4_0")]
        for shape in (
            (1, 128, 32),
            (1, 512, 32),
            (1, 4096, 32),
            (1, 4096, 8),
            (512, 512, 32),
            (512, 4096, 32),
        ):
            cases.append(lambda s=shape: attention(device, *s))
        for case in cases:
            case()
            device.release_all()


if __name__ == "__main__":
    main()
