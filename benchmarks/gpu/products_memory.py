"""What large products take of a GPU that nothing else uses, beside what its opening counted; and their first calls.

    PYTHONPATH=src:tests PI_LIB=... PI_GPU_GEMM=cublaslt python benchmarks/gpu/products_memory.py

Products of F16 rows, plain and transposed, of shapes of models from 135M to 70B and of 17 to 512 tokens. A row a
shape: the device's memory in use (NVML) less context, allocations and scratch as the library counts them, and the
longest and shortest first call, which loads a kernel or does not; at the end the process's peak. Exit code 1 where
more is used than was counted.
"""

from __future__ import annotations

import ctypes as ct
import resource
import sys
import time

import numpy as np
from nvml import Nvml

from gpu.blocks import random_rows
from gpu.device import Device, Product, opened

SHAPES = (
    (4096, 4096),
    (11008, 4096),
    (4096, 11008),
    (5120, 5120),
    (13824, 5120),
    (32000, 4096),
    (1024, 8192),
    (576, 1536),
)
TOKENS = (17, 32, 48, 64, 96, 128, 200, 256, 384, 500, 512)
MEBIBYTE = 2**20


def first_calls(device: Device, n_out: int, n_in: int) -> list[float]:
    """Seconds of every token count's first product, plain and transposed."""
    data = np.tile(random_rows("F16", 32, n_in, 1), (n_out // 32, 1))
    rows, seconds = device.rows("F16", data, n_in), []
    x, out = device.empty(512 * max(n_out, n_in) * 4), device.empty(512 * max(n_out, n_in) * 4)
    for n in TOKENS:
        for transposed in (False, True):
            start = time.perf_counter()
            if transposed:
                device.multiply_transposed(ct.byref(rows), x, n, 0, out)
            else:
                device.multiply(ct.byref(Product(rows, None, out, 0, 0)), 1, x, n, None)
            device.synchronize()
            seconds.append(time.perf_counter() - start)
    device.release_all()
    return seconds


def main() -> int:
    """Run all shapes; print a line each."""
    nvml = Nvml()
    before, start = nvml.used_bytes(), time.perf_counter()
    worst = -(2**62)
    with opened("cuda") as device:
        seconds = time.perf_counter() - start
        context = device.info_now().context_bytes
        used = nvml.used_bytes() - before
        print(
            f"opened in {seconds:.2f} s: used {used / MEBIBYTE:.0f}, counted {context / MEBIBYTE:.0f} MiB"
        )
        device.reserve(16 * MEBIBYTE, 64 * MEBIBYTE, 64 * MEBIBYTE, 0)
        for n_out, n_in in SHAPES:
            calls = first_calls(device, n_out, n_in)
            beyond = nvml.used_bytes() - before - context - device.info_now().mapped_bytes
            worst = max(worst, beyond)
            print(
                f"{n_out:5} x {n_in:5}: {beyond / MEBIBYTE:+.1f} MiB beyond what was counted; "
                f"first calls {min(calls) * 1e3:.2f} to {max(calls) * 1e3:.2f} ms"
            )
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak of the host's memory {peak_kib / 1024:.0f} MiB")
    return 1 if worst > 0 else 0


if __name__ == "__main__":
    sys.exit(main())
