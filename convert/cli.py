"""pi-convert: Hugging Face checkpoint in, PowerInfer-GGUF out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer_toolkit import cli, console
from powerinfer_toolkit.gguf_format import Dialect, NeuronOrder, TensorType

if TYPE_CHECKING:
    from powerinfer_toolkit.convert.conversion import Conversion, ConvertSettings

OUTTYPES = {name.lower(): TensorType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0")}
NEURON_ORDERS = {"hot-first": NeuronOrder.HOT_FIRST, "original": NeuronOrder.ORIGINAL}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of pi-convert."""
    parser = cli.new_parser(
        "pi-convert",
        "Convert a Hugging Face checkpoint (Llama family, SiLU or ReLU) to GGUF. A ReLU model becomes a "
        "sparse file for PowerInfer or this toolkit, a SiLU model a plain dense one.",
    )
    add = parser.add_argument
    add("source", metavar="SRC", help="directory of the checkpoint, or hub id (ID or ID@REVISION)")
    add("output", metavar="OUT.gguf", type=Path, help="file to write")
    add("--outtype", choices=OUTTYPES, default="f16", help="type of the matrices (default: f16)")
    add(
        "--dialect",
        choices=("auto", *Dialect),
        default="auto",
        help="of a ReLU model: upstream's own format, or ours, which holds more "
        "(default: auto, upstream's wherever it runs the model correctly)",
    )
    _add_sparsity(parser)
    add("--dry-run", action="store_true", help="print the tensor table and write nothing")
    add("--force", action="store_true", help="overwrite existing outputs")
    return parser


def _add_sparsity(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("sparsity").add_argument
    add(
        "--predictors",
        metavar="DIR",
        type=Path,
        help="activation predictors: model_<layer>.pt (needs torch) or .safetensors",
    )
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
        help="order of the FFN neurons (default: hot-first with --activations, else original)",
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

    settings = _settings(args)
    if args.dry_run:
        _print_table(prepare(settings))
        return
    check_outputs(settings)
    conversion = prepare(settings)
    _describe(conversion)
    conversion.write()
    console.info(f'next: pi-run -m {settings.output} -p "Once upon a time"')


def _settings(args: argparse.Namespace) -> ConvertSettings:
    from powerinfer_toolkit.convert.conversion import ConvertSettings

    return ConvertSettings(
        source=args.source,
        output=args.output,
        outtype=OUTTYPES[args.outtype],
        dialect=None if args.dialect == "auto" else Dialect(args.dialect),
        predictors=args.predictors,
        activations=args.activations,
        activation_tokens=args.activation_tokens,
        neuron_order=NEURON_ORDERS.get(args.neuron_order),
        upstream_sidecar=args.upstream_sidecar,
        force=args.force,
    )


def _describe(conversion: Conversion) -> None:
    layout, tensors = conversion.layout, conversion.tensors
    kind = f"{layout.dialect} dialect" if layout.dialect else "plain dense"
    size = sum(tensor.n_bytes for tensor in tensors)
    console.info(
        f"{layout.config.activation} {layout.config.arch.gguf_name}, {kind}, "
        f"{layout.outtype.name}: {len(tensors)} tensors, {size / 1e6:,.1f} MB"
    )


def _print_table(conversion: Conversion) -> None:
    width = max(len(tensor.name) for tensor in conversion.tensors)
    for tensor in conversion.tensors:
        shape = " x ".join(map(str, tensor.shape))
        print(f"{tensor.name:{width}}  {shape:>16}  {tensor.type.name:4}  {tensor.n_bytes:>14}")
    _describe(conversion)
