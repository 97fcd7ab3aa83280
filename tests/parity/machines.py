"""A described machine with a GPU, and plans on it."""

from __future__ import annotations

from typing import Any

from powerinfer_toolkit.runtime.plan.device import Device
from powerinfer_toolkit.runtime.plan.gpu import plan_run
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.plan import Plan
from powerinfer_toolkit.runtime.plan.planner import PlanOptions
from powerinfer_toolkit.runtime.plan.profile import MachineProfile
from powerinfer_toolkit.runtime.plan.shape import ModelShape

GIB = 2**30
# Measured on a host with an H200: design limits of the project.
PROFILE = MachineProfile(3.8e12, 132e9, 126e9, 49e9, handover_seconds=6e-6)
DEVICE = Device("H200", 90, 132, 140 * GIB, 139 * GIB, int(0.53 * GIB))
MACHINE = Machine(16, 16, 100 * GIB, DEVICE, PROFILE)


def plan_of(shape: ModelShape, gib: float, machine: Machine = MACHINE, **options: Any) -> Plan:
    asked = {"context": 1024, "split": True, **options}
    return plan_run(shape, PlanOptions(vram_budget_bytes=int(gib * GIB), **asked), machine)
