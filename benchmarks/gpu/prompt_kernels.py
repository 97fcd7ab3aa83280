"""Where the time of a prompt goes on a GPU: every kernel by name, and what lies between them.

    PYTHONPATH=src PI_LIB=... python benchmarks/gpu/prompt_kernels.py MODEL [N_TOKENS]

Speeds of six prompts (512 tokens) after one that warms up, then one more under CUPTI, by torch's profiler, which slows the
launches but not the kernels. Kernels by their time together, with its share of all kernels' time.
"""

from __future__ import annotations

import collections
import sys
import time

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from powerinfer_toolkit.runtime.model import Model

N_SHOWN = 16


def main() -> None:
    """Measure one model; print the table."""
    n_tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 512
    with Model.load(sys.argv[1], context=n_tokens, vram_budget_bytes=-1) as model:
        tokens = np.random.default_rng(1).integers(0, model.config.n_vocab, n_tokens).tolist()

        def run() -> float:
            model.forget()
            start = time.perf_counter()
            model.start_text(tokens)
            return n_tokens / (time.perf_counter() - start)

        run()
        print("tok/s", " ".join(f"{run():.0f}" for _ in range(6)), flush=True)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run()
            torch.cuda.synchronize()
    report(profiled)


def report(profiled: profile) -> None:
    """Print kernels of the profile, the most time first."""
    total: collections.Counter[str] = collections.Counter()
    count: collections.Counter[str] = collections.Counter()
    spans = []
    for event in profiled.profiler.kineto_results.events():
        if "CUDA" not in str(event.device_type()):
            continue
        start, duration = event.start_ns(), event.duration_ns()
        total[event.name()] += duration
        count[event.name()] += 1
        spans.append((start, start + duration))
    busy = max(sum(total.values()), 1)
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    print(f"{len(spans)} kernels in {(last - first) / 1e6:.2f} ms, busy {busy / 1e6:.2f} ms")
    for name, ns in total.most_common(N_SHOWN):
        each = ns / count[name] / 1e3
        print(f"{ns / 1e6:8.3f} ms {ns / busy:5.1%} {count[name]:5} x {each:7.1f} us  {name[:110]}")


if __name__ == "__main__":
    main()
