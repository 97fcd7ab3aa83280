"""The machine with the GPU that a run asks for, and how fast both read."""

from __future__ import annotations

from dataclasses import replace

from powerinfer_toolkit.runtime.plan.device import probe_device
from powerinfer_toolkit.runtime.plan.machine import Machine, probe
from powerinfer_toolkit.runtime.plan.planner import PlanOptions
from powerinfer_toolkit.runtime.plan.rates import machine_profile


def look(options: PlanOptions, *, again: bool = False) -> Machine:
    """Return this machine within the processors that the options name, with its GPU where they have a budget for one.

    `again` measures anew how fast both read.
    Raises UsageError for a processor that this process may not use, PiError where there is no GPU.
    """
    machine = probe(cpus=options.cpus)
    if not options.vram_budget_bytes:
        return machine
    device = probe_device()
    return replace(machine, device=device, profile=machine_profile(machine, device, again=again))
