"""Whether memory stays where it is over many prompts, on a GPU that nothing else uses.

    PYTHONPATH=src PI_LIB=... python benchmarks/gpu/soak.py FILE --budgets 1.5,2,3,4 --seconds 180

Prompts of random tokens and random lengths, 16 tokens decoded after each, split evenly over the budgets, each of which
opens the model anew. Host memory (resident) and the device's use after the first quarter of a budget's prompts must be
within 8 MiB of those after its last one. Exit code 1 where they are not, or where the time runs out first.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np
from nvml import Nvml

from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.sampling import Sampling

ALLOWED_BYTES = 8 * 2**20
N_DECODED = 16


def resident_bytes() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Run; print a line a budget."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--budgets", default="1.5,2,3,4", help="GiB, with commas")
    parser.add_argument("--prompts", type=int, default=200, help="of all budgets together")
    parser.add_argument("--longest", type=int, default=3000, help="tokens of a prompt")
    parser.add_argument("--seconds", type=float, default=180)
    args = parser.parse_args()
    nvml, rng = Nvml(), np.random.default_rng(0)
    end = time.monotonic() + args.seconds
    budgets = [float(text) for text in args.budgets.split(",")]
    before = nvml.used_bytes()
    failed = 0
    for budget in budgets:
        options = {"context": args.longest + N_DECODED, "vram_budget_bytes": int(budget * 2**30)}
        with Model.load(args.model, **options) as model:
            failed |= run(model, nvml, rng, args, args.prompts // len(budgets), end)
    left = nvml.used_bytes() - before
    print(f"device after the last model was closed: {left / 2**20:+.1f} MiB (the context stays)")
    return failed


def run(
    model: Model,
    nvml: Nvml,
    rng: np.random.Generator,
    args: argparse.Namespace,
    n_prompts: int,
    end: float,
) -> int:
    """All prompts of one budget; 1 where memory grew or time ran out."""
    early = (0, 0)
    n_tokens = 0
    for i in range(n_prompts):
        prompt = rng.integers(3, model.tokenizer.n_vocab, rng.integers(1, args.longest)).tolist()
        limits = {"n_predict": N_DECODED, "sampling": Sampling(seed=i), "ignore_eos": True}
        n_tokens += len(prompt) + sum(1 for _ in model.generate(prompt, **limits))
        if i == n_prompts // 4:
            early = (resident_bytes(), nvml.used_bytes())
        if time.monotonic() > end:
            print(f"out of time after {i + 1} of {n_prompts} prompts")
            return 1
    grown = (resident_bytes() - early[0], nvml.used_bytes() - early[1])
    budget = model.plan.vram_budget_bytes / 2**30
    print(
        f"{budget:.2f} GiB: {n_prompts} prompts, {n_tokens} tokens; resident {grown[0] / 2**20:+.1f} MiB, device "
        f"{grown[1] / 2**20:+.1f} MiB",
        flush=True,
    )
    return int(max(map(abs, grown)) > ALLOWED_BYTES)


if __name__ == "__main__":
    sys.exit(main())
