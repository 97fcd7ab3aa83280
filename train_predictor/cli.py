"""pi-train-predictor: train the predictors of a ReLU-sparse model."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from powerinfer_toolkit import cli, console
from powerinfer_toolkit.artifact import only_run
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.settings import add_flags, given_flags, read_yaml, resolve
from powerinfer_toolkit.train_predictor.settings import PredictorSettings
from powerinfer_toolkit.training import require_train_extra, speaks

SECTION = "train_predictor"  # of a recipe
DESCRIPTION = """
Train a small network for each layer that names the FFN neurons that will fire, calibrate the networks to an allowed
rise of the perplexity, and measure them on held-out text. Writes OUT/model_<layer>.safetensors and OUT/config.json,
which pi-convert --predictors reads, and OUT/report.json. An interrupted run goes on after the last whole group of
layers when it is started again. On several devices: accelerate launch -m powerinfer_toolkit.train_predictor.cli
MODEL STATISTICS OUT.
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of pi-train-predictor."""
    parser = cli.new_parser("pi-train-predictor", " ".join(DESCRIPTION.split()))
    parser.add_argument(
        "model", metavar="MODEL", help="checkpoint directory or ID[@REVISION] of the hub"
    )
    parser.add_argument(
        "statistics", metavar="STATISTICS", type=Path, help="what pi-profile or pi-run wrote"
    )
    parser.add_argument("output", metavar="OUT", type=Path, help="directory of the predictors")
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file with settings")
    parser.add_argument("--force", action="store_true", help="replace predictors that OUT holds")
    add_flags(parser, PredictorSettings)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run pi-train-predictor and return its exit code."""
    return cli.run(build_parser(), _command, argv)


def _command(args: argparse.Namespace) -> None:
    values = read_yaml(args.config, SECTION) if args.config else {}
    flags = given_flags(args, PredictorSettings)
    settings = resolve(PredictorSettings, values, flags, str(args.config))
    require_train_extra("pi-train-predictor")
    speaks()
    from powerinfer_toolkit.statistics import ActivationStatistics
    from powerinfer_toolkit.train_predictor.evaluation import to_table
    from powerinfer_toolkit.train_predictor.train import train_predictors

    if (args.output / "config.json").exists() and not args.force:
        raise PiError(f"{args.output} holds predictors already", hint="--force replaces them")
    statistics = ActivationStatistics.load(args.statistics)
    with only_run(args.output):
        result = train_predictors(args.model, statistics, args.output, settings)
    if speaks():
        print(to_table(result.measures, result.ranks))
    console.info(
        f"next: pi-convert {shlex.quote(args.model)} OUT.gguf --predictors {shlex.quote(str(args.output))}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
