"""Which layers are on the CPU, on the GPU, or split, and where: the least time of a token under a budget.

Within split layers the gain of a byte falls from neuron to neuron, so that taking the best byte first is optimal.
Two things are not so smooth: a layer wholly on the GPU saves its hand-over, and attention that does not fit moves a
layer to the CPU. Over both a search runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_COARSE = 8  # numbers of whole layers that are tried for every number of CPU layers
_REFINED = 3  # numbers of CPU layers that are looked at closely
_PASSES = 3  # of changing one layer at a time


@dataclass(frozen=True)
class Problem:
    """Seconds and bytes on the GPU of every layer [n_layers], by where it is.

    `split_*` [n_layers, n_steps] hold column k for the first k steps of neurons on the GPU; bytes rise along
    it. Without `may_split` layers are whole; without `may_leave` none is the CPU's.
    """

    budget_bytes: float
    cpu_seconds: Floats
    gpu_seconds: Floats
    gpu_bytes: Floats
    split_seconds: Floats
    split_bytes: Floats
    may_split: bool = True
    may_leave: bool = True

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.cpu_seconds)


@dataclass(frozen=True)
class Solution:
    """Layers before `n_cpu` are the CPU's; of the others those of `whole` the GPU's, the rest split at `steps`."""

    seconds: float
    n_bytes: float
    n_cpu: int
    whole: NDArray[np.bool_]
    steps: NDArray[np.int64]


def solve(problem: Problem) -> Solution | None:
    """Return the fastest solution found that keeps the budget; None where not even one layer fits."""
    search = _Search(problem)
    cpu_counts = range(problem.n_layers if problem.may_leave else 1)
    if not problem.may_split:
        return _best(search.fill(n_cpu, search.all_after(n_cpu)) for n_cpu in cpu_counts)
    by_cpu = [
        _best(search.fill(n_cpu, whole) for whole in search.fillings(n_cpu, coarse=True))
        for n_cpu in cpu_counts
    ]
    promising = sorted((s for s in by_cpu if s is not None), key=lambda s: s.seconds)[:_REFINED]
    best = _best(search.refine(solution) for solution in promising)
    return best and search.complete(best)


def _best(found: Iterable[Solution | None]) -> Solution | None:
    return min((s for s in found if s is not None), key=lambda s: s.seconds, default=None)


class _Search:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        # A GPU that would be waited for gains nothing from more neurons.
        seconds = np.minimum.accumulate(problem.split_seconds, axis=1)
        gains, sizes = -np.diff(seconds, axis=1), np.diff(problem.split_bytes, axis=1)
        # Rounding of sizes must not put a layer's neurons out of their order.
        rates = np.minimum.accumulate(gains / sizes, axis=1).ravel()
        order = np.argsort(-rates, kind="stable")
        order = order[rates[order] > 0]
        n_steps = sizes.shape[1]
        self._layer = order // n_steps if n_steps else order
        self._gain, self._size = gains.ravel()[order], sizes.ravel()[order]
        self._preference = np.argsort(-self._filling_rates(), kind="stable")

    def _filling_rates(self) -> Floats:
        """Return what a byte gains at least when a layer is filled to its end: the tangent to its split curve."""
        p = self._problem
        gain = p.split_seconds - p.gpu_seconds[:, None]
        size = np.maximum(p.gpu_bytes[:, None] - p.split_bytes, 1.0)
        rates: Floats = (gain / size).min(axis=1)
        return rates

    def all_after(self, n_cpu: int) -> NDArray[np.bool_]:
        """Return all layers that are not the CPU's."""
        return np.arange(self._problem.n_layers) >= n_cpu

    def fillings(self, n_cpu: int, *, coarse: bool) -> Iterator[NDArray[np.bool_]]:
        """Yield sets of whole layers, from none to all, in the order of what filling them gains."""
        layers = self._preference[self._preference >= n_cpu]
        n = len(layers)
        counts = (
            range(n + 1) if not coarse else sorted({n * i // _COARSE for i in range(_COARSE + 1)})
        )
        for count in counts:
            whole = np.zeros(self._problem.n_layers, dtype=np.bool_)
            whole[layers[:count]] = True
            yield whole

    def fill(self, n_cpu: int, whole: NDArray[np.bool_]) -> Solution | None:
        """Return the best split of the layers that are neither the CPU's nor whole; None beyond the budget."""
        p = self._problem
        split = self.all_after(n_cpu) & ~whole
        base = float(p.gpu_bytes[whole].sum() + p.split_bytes[split, 0].sum())
        if base > p.budget_bytes:
            return None
        ours = split[self._layer]
        taken = ours & (np.cumsum(np.where(ours, self._size, 0.0)) <= p.budget_bytes - base)
        seconds = (
            p.cpu_seconds[:n_cpu].sum()
            + p.gpu_seconds[whole].sum()
            + p.split_seconds[split, 0].sum()
            - self._gain[taken].sum()
        )
        steps = np.bincount(self._layer[taken], minlength=p.n_layers)
        return Solution(float(seconds), base + float(self._size[taken].sum()), n_cpu, whole, steps)

    def refine(self, start: Solution) -> Solution:
        """Return the best with that many CPU layers, trying every number of whole ones, then layer by layer."""
        fillings = self.fillings(start.n_cpu, coarse=False)
        best = _best([start, *(self.fill(start.n_cpu, whole) for whole in fillings)]) or start
        for _ in range(_PASSES):
            before = best
            for layer in range(start.n_cpu, self._problem.n_layers):
                whole = best.whole.copy()
                whole[layer] = not whole[layer]
                best = _best([best, self.fill(start.n_cpu, whole)]) or best
            if best is before:
                break
        return best

    def complete(self, solution: Solution) -> Solution:
        """Spend what is left of the budget on steps that are smaller than the first one that did not fit."""
        p, steps = self._problem, solution.steps.copy()
        left, seconds = p.budget_bytes - solution.n_bytes, solution.seconds
        open_layers = set(np.flatnonzero(self.all_after(solution.n_cpu) & ~solution.whole).tolist())
        seen = np.zeros(p.n_layers, dtype=np.int64)
        for layer, gain, size in zip(self._layer, self._gain, self._size, strict=True):
            seen[layer] += 1
            if layer not in open_layers or seen[layer] <= solution.steps[layer]:
                continue
            if size > left:
                open_layers.remove(layer)
                if not open_layers:
                    break
                continue
            steps[layer] += 1
            left, seconds = left - size, seconds - gain
        n_bytes = p.budget_bytes - left
        return replace(solution, seconds=float(seconds), n_bytes=float(n_bytes), steps=steps)
