"""pi-bench synth: the flags, and what is said of the file."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from powerinfer_toolkit import cli, console

DESCRIPTION = "Write a model of a known shape with random weights to measure: ReLU-sparse, hot neurons first, with predictors."
OUTTYPES = (
    *("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"),
    *("iq4_nl", "q5_k", "q4_k", "q3_k"),
)
LOCALITIES = ("smollm2", "powerinfer")


def add_synth_command(commands: Any) -> None:  # noqa: ANN401 - argparse's type has no name
    """Add the subcommand; its namespace has run(args)."""
    parser = cli.add_command(commands, "synth", DESCRIPTION)
    parser.set_defaults(run=_run)
    parser.add_argument(
        "shape",
        metavar="SHAPE",
        help="135m, 1b, 7b, mistral-7b, 8b, 13b, 70b, falcon-40b-gated, or tiny for tests",
    )
    parser.add_argument("output", metavar="OUT.gguf", type=Path, help="the file to write")
    parser.add_argument(
        "--outtype",
        choices=OUTTYPES,
        default="q4_0",
        metavar="TYPE",
        help=f"type of the matrices (default %(default)s): {', '.join(OUTTYPES)}",
    )
    parser.add_argument(
        "--zeros",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="mean share of neurons that are silent at a token (default %(default)s)",
    )
    parser.add_argument(
        "--locality",
        choices=LOCALITIES,
        default="smollm2",
        help="how unevenly neurons fire: 26%% of them carry 67%% of the activations, as in the ReGLU SmolLM2 "
        "(default), or 80%%, as PowerInfer reports",
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="number of layers (default: the shape's)"
    )
    parser.add_argument(
        "--dense-twin",
        action="store_true",
        help="write the same model as a plain dense file instead, which llama.cpp runs: ffn_down, SiLU, no predictors",
    )
    parser.add_argument("--force", action="store_true", help="overwrite OUT.gguf")


def _run(args: argparse.Namespace) -> None:
    from powerinfer_toolkit.gguf_format import TensorType
    from powerinfer_toolkit.runtime.synth.firing import Locality
    from powerinfer_toolkit.runtime.synth.write import SynthSettings, write_synth

    settings = SynthSettings(
        shape=args.shape,
        output=args.output,
        outtype=TensorType[args.outtype.upper()],
        zeros=args.zeros,
        locality=Locality(args.locality),
        n_layers=args.layers,
        dense_twin=args.dense_twin,
        force=args.force,
    )
    start = time.perf_counter()
    size = write_synth(settings)
    seconds = time.perf_counter() - start
    console.info(
        f"{args.output}: {size / 1e9:.2f} GB in {seconds:.1f} s ({size / seconds / 1e9:.2f} GB/s), synthetic"
    )
