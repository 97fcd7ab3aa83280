"""pi-convert: Hugging Face checkpoint or GGUF in, PowerInfer-GGUF out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer_toolkit import cli, console
from powerinfer_toolkit.gguf_format import Activation, Dialect, NeuronOrder

if TYPE_CHECKING:
    from powerinfer_toolkit.convert.dialect import RequestedDialect
    from powerinfer_toolkit.convert.settings import ConvertSettings

# The names of convert.outtypes, which needs numpy and would slow --help; a test compares them.
OUTTYPES = tuple(
    [
        "f32",
        "f16",
        "bf16",
        "q8_0",
        "q5_1",
        "q5_0",
        "q4_1",
        "q4_0",
        "iq4_nl",
        "q5_k",
        "q4_k",
        "q3_k",
        "q6_k",
        "q5_k_m",
        "q5_k_s",
        "q4_k_m",
        "q4_k_s",
        "q3_k_m",
        "q2_k",
    ]
)
NEURON_ORDERS = {"hot-first": NeuronOrder.HOT_FIRST, "original": NeuronOrder.ORIGINAL}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of pi-convert."""
    parser = cli.new_parser(
        "pi-convert",
        "Convert a Hugging Face checkpoint (Llama family, SiLU or ReLU) to GGUF, or a GGUF file to another. "
        "A ReLU model becomes a sparse file for PowerInfer or this toolkit, a SiLU model a plain dense one.",
    )
    add = parser.add_argument
    add(
        "source",
        metavar="SRC",
        help="directory of the checkpoint, model file (GGUF, PowerInfer's included), or hub id "
        "(ID or ID@REVISION)",
    )
    add("output", metavar="OUT.gguf", type=Path, help="file to write")
    add(
        "--outtype",
        choices=OUTTYPES,
        help="type of the matrices; q6_k, q2_k and names with _s or _m are llama.cpp's mixtures "
        "(default: f16; of a model file, what it has)",
    )
    add(
        "--dialect",
        choices=("auto", *Dialect, "dense"),
        default="auto",
        help="upstream's own sparse format, ours, which holds more, or dense, for SiLU models only "
        "(default: auto, of a ReLU model upstream's wherever it runs the model correctly; of a model file, "
        "what it is)",
    )
    add(
        "--imatrix",
        metavar="FILE",
        type=Path,
        help="importance matrix of llama.cpp (GGUF or .dat), for types of 2 to 6 bits",
    )
    add(
        "--hidden-act",
        choices=tuple(Activation),
        help="activation of a model file that does not say (default: silu in a dense GGUF)",
    )
    add(
        "--allow-nonfinite",
        action="store_true",
        help="convert NaN and infinite weights: kept in f32, f16 and bf16, else written as 0",
    )
    add(
        "--outlier-ratio",
        metavar="R",
        type=float,
        help="of a sparse model, keep ffn_down_t in F16 where a weight is R times the root mean square, as in layers "
        "that feed an attention sink, and then attn_v in 8 bits, or 16 for q8_0 (default: 20; 0: as --outtype says)",
    )
    _add_sparsity(parser)
    add("--dry-run", action="store_true", help="print the tensor table and write nothing")
    add("--force", action="store_true", help="overwrite existing outputs")
    return parser


def _add_sparsity(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sparsity")
    add = group.add_argument
    add(
        "--predictors",
        metavar="DIR",
        type=Path,
        help="activation predictors: model_<layer>.pt (needs torch) or .safetensors; they replace those of "
        "a model file",
    )
    add("--no-predictors", action="store_true", help="leave out the predictors of a model file")
    add(
        "--activations",
        metavar="PATH",
        type=Path,
        help="activation counts: a directory of activation_<layer>.pt (needs torch) or .safetensors, "
        "or one .npy or .safetensors file [layers, neurons]",
    )
    add(
        "--activation-tokens",
        metavar="N",
        type=int,
        help="tokens that the counts were taken over (default: as the file says, else unknown)",
    )
    add(
        "--neuron-order",
        choices=NEURON_ORDERS,
        help="order of the FFN neurons (default: hot-first with --activations, else as it is)",
    )
    add(
        "--upstream-sidecar",
        action="store_true",
        help="also write activation/activation_<layer>.pt for upstream's solver (needs torch)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run pi-convert and return its exit code."""
    return cli.run(build_parser(), _command, argv)


def _command(args: argparse.Namespace) -> None:
    from powerinfer_toolkit.convert.conversion import check_outputs, prepare
    from powerinfer_toolkit.convert.summary import describe, table, warn

    settings = _settings(args)
    if args.dry_run:
        conversion = prepare(settings)
        print("\n".join(table(conversion)))
    else:
        check_outputs(settings)
        conversion = prepare(settings)
    warn(conversion)
    describe(conversion)
    if not args.dry_run:
        conversion.write()
        console.info(f'next: pi-run -m {settings.output} -p "Once upon a time"')


def _settings(args: argparse.Namespace) -> ConvertSettings:
    from powerinfer_toolkit.convert.outliers import OUTLIER_RATIO
    from powerinfer_toolkit.convert.outtypes import OutType
    from powerinfer_toolkit.convert.settings import ConvertSettings

    dialects: dict[str, RequestedDialect | None] = {"auto": None, "dense": "dense"}
    dialects |= {str(dialect): dialect for dialect in Dialect}
    return ConvertSettings(
        source=args.source,
        output=args.output,
        outtype=OutType(args.outtype) if args.outtype else None,
        dialect=dialects[args.dialect],
        predictors=args.predictors,
        drop_predictors=args.no_predictors,
        activations=args.activations,
        activation_tokens=args.activation_tokens,
        neuron_order=NEURON_ORDERS.get(args.neuron_order),
        imatrix=args.imatrix,
        hidden_act=Activation(args.hidden_act) if args.hidden_act else None,
        outlier_ratio=OUTLIER_RATIO if args.outlier_ratio is None else args.outlier_ratio,
        upstream_sidecar=args.upstream_sidecar,
        allow_nonfinite=args.allow_nonfinite,
        force=args.force,
    )
