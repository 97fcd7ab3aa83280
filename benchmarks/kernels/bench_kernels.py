"""The kernel lab: every kernel of every usable instruction set, one thread, as markdown tables.

Dot and axpy read a matrix of 256 MiB (beyond any last-level cache) and one of 384 KiB (in L2); the figure is bytes of
weights a second, to be held against a plain read of memory, which numpy's maximum stands for. Products of many
tokens and attention are given in float operations a second, packing of their inputs included. Times are the best
of several, in processor time of the thread, so that a busy machine disturbs less.

    PI_LIB=build/dev/runtime/native/libpi.so python benchmarks/kernels/bench_kernels.py [--isa avx2] [--kernels dot gemm]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.native_lib import FloatPtr, Int32Ptr, pointer

FLOAT_TYPES = (Type.F32, Type.F16, Type.BF16)
QUANTISED_TYPES = (Type.Q8_0, Type.Q4_0, Type.Q4_1)
# Their vector code is that of int8 activations; in floats they are unpacked block by block.
UNPACKED_TYPES = (
    *(Type.Q5_0, Type.Q5_1, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
    *(Type.IQ4_NL, Type.MXFP4),
)
SIZES = {"memory": 256 << 20, "L2": 384 << 10}
N_COLS = 2048
ACTIVE_SHARE = 0.25  # of the rows, where only some are read
KERNELS = ("dot", "axpy", "gemm", "attention")


def best_seconds(run: Callable[[], object], budget_seconds: float) -> float:
    """Shortest thread time of one call, over as many as fit the budget, at least three."""
    run()
    best, total, n = math.inf, 0.0, 0
    while total < budget_seconds or n < 3:
        start = time.thread_time_ns()
        run()
        seconds = (time.thread_time_ns() - start) * 1e-9
        best, total, n = min(best, max(seconds, 1e-9)), total + seconds, n + 1
    return best


@dataclass
class Lab:
    """One instruction set and the time that a figure may take."""

    isa: str
    budget_seconds: float

    def rate(self, work: float, call: Callable[[], object], repeat: int = 1) -> str:
        """Work in units of 1e9 a second; the call is made `repeat` times, where one would be too short."""

        def run() -> None:
            for _ in range(repeat):
                call()

        return f"{work * repeat / best_seconds(run, self.budget_seconds) * 1e-9:.1f}"


@dataclass
class Matrix:
    """Rows of one type with plausible numbers, and lists of all or some of them."""

    kind: Type
    data: np.ndarray  # [n_rows, row bytes]
    some: np.ndarray  # int32, ascending

    @classmethod
    def random(cls, kind: Type, n_bytes: int) -> Matrix:
        rng = np.random.default_rng(0)
        if (
            kind in UNPACKED_TYPES
        ):  # gguf-py cannot write all of them; no byte makes a scale infinite
            n_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            rows = rng.integers(0, 0x40, (64, N_COLS // n_elements * block_bytes), dtype=np.uint8)
        else:
            sample = rng.standard_normal((64, N_COLS)).astype(np.float32)
            rows = np.ascontiguousarray(gguf.quants.quantize(sample, kind)).view(np.uint8)
        n_rows = max(n_bytes // rows.shape[1], 1)
        data = np.resize(rows, (n_rows, rows.shape[1]))
        return cls(kind, data, np.flatnonzero(rng.random(n_rows) < ACTIVE_SHARE).astype(np.int32))

    def repeats(self) -> int:
        """Calls that make a measurement of some 0.5 ms."""
        return max((16 << 20) // self.data.nbytes, 1)


def dot_rate(lab: Lab, matrix: Matrix, activation: Type, index: np.ndarray | None) -> str:
    rows = len(matrix.data) if index is None else len(index)
    x, out = np.ones(N_COLS, np.float32), np.empty(rows, np.float32)
    arguments = (
        *(lab.isa.encode(), matrix.kind, activation, matrix.data.ctypes.data),
        *(None if index is None else pointer(index, Int32Ptr), rows, N_COLS),
        *(pointer(x, FloatPtr), pointer(out, FloatPtr)),
    )
    call = partial(native_lib.load().pi_kernel_dot_rows, *arguments)
    return lab.rate(rows * matrix.data.shape[1], call, matrix.repeats())


def axpy_rate(lab: Lab, matrix: Matrix, index: np.ndarray | None) -> str:
    rows = len(matrix.data) if index is None else len(index)
    coef, out = np.full(rows, 1e-3, np.float32), np.zeros(N_COLS, np.float32)
    arguments = (
        *(lab.isa.encode(), matrix.kind, matrix.data.ctypes.data),
        *(None if index is None else pointer(index, Int32Ptr), rows, N_COLS),
        *(pointer(coef, FloatPtr), 0, N_COLS, pointer(out, FloatPtr)),
    )
    call = partial(native_lib.load().pi_kernel_axpy_rows, *arguments)
    return lab.rate(rows * matrix.data.shape[1], call, matrix.repeats())


def row_figures(lab: Lab, kernel: str, matrix: Matrix) -> list[str]:
    """All rows, then some of them; a dot product of a quantised type also with int8 activations."""
    choices = (None, matrix.some)
    if kernel == "axpy":
        return [axpy_rate(lab, matrix, index) for index in choices]
    figures = [dot_rate(lab, matrix, Type.F32, index) for index in choices]
    if matrix.kind in FLOAT_TYPES:
        return [*figures, "", ""]
    return [*figures, *(dot_rate(lab, matrix, Type.Q8_0, index) for index in choices)]


def row_table(labs: list[Lab], kernel: str, kinds: list[Type]) -> Iterator[str]:
    some = f"{ACTIVE_SHARE:.0%} of the rows"
    columns = ["all rows", some]
    if kernel == "dot":
        columns = ["float x, all rows", some, "int8 x, all rows", some]
    yield from header(f"{kernel}, GB/s of weights", ["type", "isa", "matrix in", *columns])
    for kind in kinds:
        for place, n_bytes in SIZES.items():
            matrix = Matrix.random(kind, n_bytes)
            for lab in labs:
                yield line([kind.name, lab.isa, place, *row_figures(lab, kernel, matrix)])


def gemm_rate(lab: Lab, shape: tuple[int, int, int], transposed: bool) -> str:
    n_rows, n_k, n_tokens = shape
    w, x = np.ones(n_rows * n_k, np.float32), np.ones(n_tokens * n_k, np.float32)
    out = np.empty(n_tokens * n_rows, np.float32)
    call = partial(
        native_lib.load().pi_kernel_gemm,
        *(lab.isa.encode(), pointer(w, FloatPtr), transposed, n_rows, n_k),
        *(pointer(x, FloatPtr), n_tokens, pointer(out, FloatPtr)),
    )
    return lab.rate(2 * n_rows * n_k * n_tokens, call)


def gemm_table(labs: list[Lab]) -> Iterator[str]:
    yield from header("gemm, GFLOP/s", ["rows x k x tokens", "isa", "w [row, k]", "w [k, row]"])
    for shape in ((96, 256, 512), (768, 768, 512)):
        for lab in labs:
            figures = [gemm_rate(lab, shape, transposed) for transposed in (False, True)]
            yield line([" x ".join(map(str, shape)), lab.isa, *figures])


def attention_rate(lab: Lab, kind: Type, n_q: int, n_positions: int, head_dim: int) -> str:
    rng = np.random.default_rng(0)
    sizes = (n_q, n_positions, n_positions)
    q, k, v = (rng.standard_normal((n, head_dim), dtype=np.float32) for n in sizes)
    out, lse = np.empty_like(q), np.empty(n_q, np.float32)
    call = partial(
        native_lib.load().pi_kernel_attention,
        *(lab.isa.encode(), kind, pointer(q, FloatPtr), n_q),
        *(pointer(k, FloatPtr), pointer(v, FloatPtr), n_positions, head_dim, 0.1),
        *(pointer(out, FloatPtr), pointer(lse, FloatPtr)),
    )
    return lab.rate(4 * n_q * n_positions * head_dim, call)


def attention_table(labs: list[Lab]) -> Iterator[str]:
    n_q, n_positions = 64, 1024
    title = f"attention of {n_q} queries to {n_positions} positions, GFLOP/s"
    yield from header(title, ["head_dim", "isa", "F32 cache", "F16 cache"])
    for head_dim in (64, 128):
        for lab in labs:
            kinds = (Type.F32, Type.F16)
            figures = [attention_rate(lab, kind, n_q, n_positions, head_dim) for kind in kinds]
            yield line([str(head_dim), lab.isa, *figures])


def header(title: str, columns: list[str]) -> Iterator[str]:
    yield f"\n### {title}\n"
    yield line(columns)
    yield line(["---"] * len(columns))


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def plain_read(budget_seconds: float) -> float:
    """GB/s at which numpy finds the largest number of an array beyond the caches."""
    array = np.ones(SIZES["memory"] // 4, np.float32)
    return array.nbytes / best_seconds(array.max, budget_seconds) * 1e-9


def main() -> None:
    parser = argparse.ArgumentParser(description="time every kernel", allow_abbrev=False)
    usable = [name for name, works in native_lib.instruction_sets() if works]
    parser.add_argument("--isa", nargs="+", default=usable, choices=usable)
    parser.add_argument("--kernels", nargs="+", default=KERNELS, choices=KERNELS)
    names = [kind.name for kind in (*FLOAT_TYPES, *QUANTISED_TYPES, *UNPACKED_TYPES)]
    parser.add_argument("--types", nargs="+", default=names, choices=names)
    parser.add_argument("--seconds", type=float, default=0.2, help="for each figure")
    options = parser.parse_args()
    labs = [Lab(isa, options.seconds) for isa in options.isa]
    print(f"Plain read of memory: {plain_read(1):.1f} GB/s")
    for kernel in options.kernels:
        tables = {"gemm": gemm_table, "attention": attention_table}
        kinds = [Type[name] for name in options.types]
        table = tables[kernel](labs) if kernel in tables else row_table(labs, kernel, kinds)
        for text in table:
            print(text, flush=True)


if __name__ == "__main__":
    main()
