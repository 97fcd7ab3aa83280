"""Prompts of a split model with and without streaming: seconds of a step by its tokens, and peak device memory.

    PYTHONPATH=src PI_LIB=... python benchmarks/gpu/streaming.py FOLDER [--layers 8] [--type f16] [--share 0.3]

Writes the first layers of a random 13b shape to FOLDER (5.6 GB in F16 with 8), plans it under a budget that holds a share
of its weights, and runs steps of rising sizes under that plan twice: as it is, and without streaming. A Markdown table;
exit code 1 if the peak (NVML, the whole device) is above the budget. On a GPU that nothing else uses.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import numpy as np
from nvml import Nvml

from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime.engine import Batch
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.device import probe_device
from powerinfer_toolkit.runtime.plan.gpu import plan_run
from powerinfer_toolkit.runtime.plan.need import gpu_need
from powerinfer_toolkit.runtime.plan.plan import Plan
from powerinfer_toolkit.runtime.plan.planner import PlanOptions
from powerinfer_toolkit.runtime.plan.streaming import without_streaming
from powerinfer_toolkit.runtime.plan.surroundings import look
from powerinfer_toolkit.runtime.synth.shapes import SHAPES
from powerinfer_toolkit.runtime.synth.write import SynthSettings, write_synth

SIZES = (17, 32, 64, 128, 256, 512, 1024, 2048)
SLOWEST_SECONDS = 3.0  # of a step, after which larger ones are left out


def seconds_of(path: Path, plan: Plan) -> tuple[dict[int, float], int]:
    """Return the better of two runs of each step, and the device memory in use after them."""
    found: dict[int, float] = {}
    with Model(ModelFile(path), plan) as model:
        for n_tokens in SIZES:
            times = []
            for _ in range(2):
                model.forget()
                begin = time.perf_counter()
                model.engine.run(Batch(np.arange(n_tokens) + 3))
                times.append(time.perf_counter() - begin)
            found[n_tokens] = min(times)
            if found[n_tokens] > SLOWEST_SECONDS:
                break
        return found, Nvml().used_bytes()


def main() -> int:
    """Write the model, plan, run both."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--type", default="f16")
    parser.add_argument("--share", type=float, default=0.3)
    args = parser.parse_args()
    SHAPES["part"] = dataclasses.replace(SHAPES["13b"], name="part", n_layers=args.layers)
    path = args.folder / f"part-{args.layers}-{args.type}.gguf"
    if not path.exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        write_synth(SynthSettings("part", path, TensorType[args.type.upper()]))
    before = Nvml().used_bytes()
    with ModelFile(path) as file:
        asked = PlanOptions(context=2048, batch=2048, ffn="exact", vram_budget_bytes=-1)
        machine = look(asked)
        whole = plan_run(file.shape, asked, machine)
        need = gpu_need(file.shape, whole, whole.units, probe_device())
        budget = round(need.total_bytes - (1 - args.share) * need.weight_bytes)
        plan = plan_run(file.shape, dataclasses.replace(asked, vram_budget_bytes=budget), machine)
    print(f"streams from {plan.stream_tokens} tokens; rates {machine.profile}", file=sys.stderr)
    streamed, used = seconds_of(path, plan)
    shared, _ = seconds_of(path, without_streaming(plan))
    print("| tokens | streamed, ms | CPU's share on the CPU, ms |\n|---|---|---|")
    for n_tokens, seconds in streamed.items():
        other = f"{shared[n_tokens] * 1e3:.1f}" if n_tokens in shared else "-"
        print(f"| {n_tokens} | {seconds * 1e3:.1f} | {other} |")
    print(f"device memory {(used - before) / 2**20:.0f} MiB of {budget / 2**20:.0f}")
    return 1 if used - before > budget else 0


if __name__ == "__main__":
    sys.exit(main())
