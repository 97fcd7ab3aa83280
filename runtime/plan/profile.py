"""How fast a machine's parts read weights: what the planner weighs placements by."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer_toolkit.runtime.plan.plan import HandOver


@dataclass(frozen=True)
class MachineProfile:
    """The rates at which weights are read, and what a split layer costs beside its reads.

    The GPU reads its own memory, the threads RAM. GPU kernels pull from pinned RAM while the threads read beside
    them at `cpu_beside_`; `pull_` 0: not known, and nothing is pulled. `handover_seconds` None: what HANDOVER_SECONDS
    says.
    """

    gpu_bytes_per_second: float
    cpu_bytes_per_second: float
    cpu_beside_bytes_per_second: float
    pull_bytes_per_second: float = 0.0
    handover_seconds: float | None = None

    def handover(self, kind: HandOver) -> float:
        """Return the seconds that one hand-over takes."""
        return HANDOVER_SECONDS[kind] if self.handover_seconds is None else self.handover_seconds


# Of one token's vector there and back, beside the launches; docs/plan.md says where the figures come from.
HANDOVER_SECONDS = {
    HandOver.AUTO: 7e-6,
    HandOver.SPIN: 7e-6,
    HandOver.WAIT_VALUE: 12e-6,
    HandOver.EVENT: 25e-6,
}
# A machine of which nothing is measured: a GPU of the middle class beside two channels of memory.
UNMEASURED = MachineProfile(4e11, 4e10, 4e10)
