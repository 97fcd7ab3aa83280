"""Flags that pi-run and pi-bench share: the model, the engine, and PowerInfer's GPU flags."""

from __future__ import annotations

import argparse
import os
import re
from typing import TYPE_CHECKING

from powerinfer_toolkit.errors import UsageError

if TYPE_CHECKING:
    from powerinfer_toolkit.runtime.plan.planner import PlanOptions


def add_model_options(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add -m, which may name several models, and the flags that shape the plan."""
    group = parser.add_argument_group("model and engine")
    text = "model file, GGUF or PowerInfer-GGUF"
    if several:
        text += "; several with commas or by repeating the flag"
        group.add_argument(
            "-m", "--model", metavar="FILE", type=_file_names, action="extend", help=text
        )
    else:
        group.add_argument("-m", "--model", metavar="FILE", help=text)
    group.add_argument(
        "-b",
        "--batch-size",
        type=int,
        default=512,
        metavar="N",
        help="most tokens of a step (default %(default)s)",
    )
    group.add_argument(
        "--ram-budget",
        metavar="GIB",
        help="ceiling of memory in GiB, or with a unit (6000MiB), over weights, KV cache, scratch and the program "
        "itself; exit code 3 with the least that would do where it is too small (default: KV cache and scratch "
        "must fit into the available memory)",
    )
    group.add_argument(
        "--ffn",
        choices=("dense", "exact", "predicted"),
        help="how FFN neurons are chosen: all; those whose ReLU gate is open, which loses nothing; those a "
        "predictor names. Default: exact for ReLU-sparse files, predicted only where the file records a "
        "perplexity loss of at most 1%%, else dense",
    )
    group.add_argument(
        "--predict-all",
        action="store_true",
        help="mask every position of every step, the first one too: PowerInfer's own rule, for comparison",
    )
    group.add_argument(
        "--sparse-threshold",
        type=float,
        metavar="X",
        help="a neuron is predicted active if its logit is at least X (default: the file's)",
    )
    group.add_argument(
        "--kv-type",
        choices=("f32", "f16"),
        help="type of the KV cache (default f16; f32 with f32 matrices or activations)",
    )
    group.add_argument(
        "--activation-type",
        choices=("f32", "q8_0"),
        help="type of activations against quantised weights: q8_0 is int8 blocks (default), f32 is exact",
    )
    group.add_argument(
        "--isa",
        metavar="NAME",
        help="instruction set of the kernels, see --doctor (default: $PI_ISA, else the best one)",
    )
    _add_cpu_options(parser)
    _add_gpu_options(parser, several=several)


def _add_cpu_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("processors").add_mutually_exclusive_group()
    group.add_argument(
        "-C",
        "--cpu-mask",
        dest="cpus",
        type=_mask_cpus,
        metavar="HEX",
        help="run the threads on these logical processors only, bit i for processor i; at most as many threads "
        "as processors (default: all that this process may use)",
    )
    group.add_argument(
        "-Cr",
        "--cpu-range",
        dest="cpus",
        type=_range_cpus,
        metavar="LO-HI",
        help="the same as a range, both ends included",
    )


def _mask_cpus(text: str) -> tuple[int, ...]:
    """Parse a hexadecimal mask of logical processors."""
    digits = text.removeprefix("0x")
    if not re.fullmatch(r"[0-9a-fA-F]{1,256}", digits) or not int(digits, 16):
        raise argparse.ArgumentTypeError(f"{text!r} is no hexadecimal mask with a bit set")
    mask = int(digits, 16)
    return tuple(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


def _range_cpus(text: str) -> tuple[int, ...]:
    """Parse LO-HI, both included."""
    found = re.fullmatch(r"(\d{1,4})-(\d{1,4})", text)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of processors like 0-3")
    return tuple(range(int(found[1]), int(found[2]) + 1))


def _add_gpu_options(parser: argparse.ArgumentParser, *, several: bool) -> None:
    group = parser.add_argument_group("PowerInfer's GPU flags")
    several_text = "; several with commas are measured one after the other" if several else ""
    group.add_argument(
        "--vram-budget",
        metavar="GIB",
        help="ceiling of GPU memory in GiB, or with a unit (6000MiB), over weights, KV cache, scratch and CUDA "
        "context; attention and the neurons that fire most go there as far as it allows, the others are computed by "
        "the CPU at the same time; -1: what is free, less 512 MiB; 0 (default): CPU only, a GPU is not used unasked"
        + several_text,
    )
    group.add_argument(
        "--disable-gpu-index",
        action="store_true",
        help="split no layer by neurons: layers are whole, the last ones on the GPU as far as --vram-budget allows",
    )
    group.add_argument(
        "--reset-gpu-index",
        action="store_true",
        help="accepted for PowerInfer's command lines: the split is computed from the budget at every start and "
        "kept nowhere, so there is nothing to reset",
    )
    group.add_argument(
        "--handover",
        choices=("auto", "spin", "wait-value", "event"),
        default="auto",
        help="how the sides of a split layer wait for each other: kernels that poll, the stream's wait for a value, or "
        "launches one after the other, where nothing on the GPU waits (for a GPU that also draws); default: as the "
        "device allows",
    )
    group.add_argument(
        "-ngl",
        "--n-gpu-layers",
        metavar="N",
        help="llama.cpp's way to place layers: refused, use --vram-budget",
    )


def check_gpu_options(args: argparse.Namespace) -> None:
    """UsageError for flags that are refused or have nothing to act on, and for a budget that is no size."""
    if args.n_gpu_layers is not None:
        raise UsageError(
            "-ngl is not supported: layers are not placed one by one",
            hint="use --vram-budget GIB, the memory that the GPU part may take",
        )
    budgets = [_vram_budget(text) for text in vram_budgets(args)]
    if args.handover != "auto" and not any(budgets):
        raise UsageError(
            f"--handover {args.handover} has no effect without a GPU", hint="give --vram-budget GIB"
        )


def _parse_bytes(flag: str, text: str) -> float:
    """Return a size in bytes: a number of GiB, or a number with KiB, MiB or GiB."""
    parts = re.fullmatch(
        r"(-?\d+(?:\.\d*)?|-?\.\d+)\s*(?:([KMG])i?B?)?", text.strip(), re.IGNORECASE
    )
    if not parts:
        raise UsageError(
            f"{flag} {text!r} is no size", hint="give GiB (8, 7.5) or a unit (6000MiB)"
        )
    scale = {"k": 2**10, "m": 2**20, "g": 2**30}[(parts[2] or "g").lower()]
    return min(float(parts[1]) * scale, 2.0**62)  # more than any machine has


def _ram_budget(args: argparse.Namespace) -> int | None:
    if args.ram_budget is None:
        return None
    n_bytes = _parse_bytes("--ram-budget", args.ram_budget)
    if n_bytes < 1:
        raise UsageError(
            f"--ram-budget {args.ram_budget} is out of range", hint="give a positive size"
        )
    return int(n_bytes)


def require_model(args: argparse.Namespace) -> str:
    """Return the path given with -m; UsageError without one."""
    if not args.model:
        raise UsageError("no model given", hint="name one with -m FILE")
    return str(args.model)


def require_models(args: argparse.Namespace) -> list[str]:
    """Return the paths given with -m where it may name several; UsageError without one."""
    require_model(args)
    return list(args.model)


def _file_names(text: str) -> list[str]:
    return [text] if os.path.exists(text) else text.split(",")


def vram_budgets(args: argparse.Namespace) -> list[str | None]:
    """Return the texts of --vram-budget, which may name several where -m may."""
    if args.vram_budget is None or not isinstance(args.model, list):
        return [args.vram_budget]
    return list(args.vram_budget.split(","))


def _vram_budget(text: str | None) -> int | None:
    if text is None:
        return None
    n_bytes = _parse_bytes("--vram-budget", text)
    if n_bytes >= 0:
        return int(n_bytes)
    if text.strip() != "-1":
        raise UsageError(
            f"--vram-budget {text} is out of range",
            hint="give a size, 0 for the CPU alone or -1 for what is free",
        )
    return -1


def plan_options(
    args: argparse.Namespace, threads: int | None, context: int | None, vram_budget: str | None
) -> PlanOptions:
    """Return the planner's options from the flags of add_model_options and what each command counts."""
    from powerinfer_toolkit.runtime.plan.planner import PlanOptions

    return PlanOptions(
        threads=threads,
        context=context,
        batch=args.batch_size,
        ffn=args.ffn,
        predict_all=args.predict_all,
        kv_type=args.kv_type,
        activation_type=args.activation_type,
        sparse_threshold=args.sparse_threshold,
        isa=args.isa,
        ram_budget_bytes=_ram_budget(args),
        vram_budget_bytes=_vram_budget(vram_budget),
        cpus=args.cpus,
        split=not args.disable_gpu_index,
        handover=args.handover,
    )
