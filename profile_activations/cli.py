"""pi-profile: count which FFN neurons fire, and report on the counts."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from powerinfer_toolkit import cli, console
from powerinfer_toolkit.artifact import only_run
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.profile_activations.settings import ProfileSettings
from powerinfer_toolkit.settings import add_flags, given_flags, read_yaml, resolve
from powerinfer_toolkit.training import require_train_extra, speaks

DESCRIPTION = """
Count, over a text, how often each FFN neuron of a ReLU-sparse model fires; position 0 of a block, BOS and padding
are not counted. Writes OUT/statistics.safetensors, which pi-convert --activations and pi-train-predictor read.
An interrupted run goes on where it was when it is started again. On several devices: accelerate launch -m
powerinfer_toolkit.profile_activations.cli MODEL OUT. `pi-profile report OUT` prints what was counted.
"""
REPORT = "report"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of pi-profile."""
    parser = cli.new_parser("pi-profile", " ".join(DESCRIPTION.split()))
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="checkpoint directory or ID[@REVISION] of the hub; the word report: print a report on OUT",
    )
    parser.add_argument("output", metavar="OUT", type=Path, help="directory of the statistics")
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file with settings")
    parser.add_argument("--force", action="store_true", help="replace statistics that OUT holds")
    group = parser.add_argument_group("report")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument(
        "--plot",
        metavar="DIR",
        type=Path,
        help="write pictures into DIR (needs the extra plot): activation CDF by layer, zero share by layer, "
        "hot-neuron heat map",
    )
    group.add_argument(
        "--plot-format",
        choices=("png", "svg"),
        default="png",
        help="their format (default %(default)s)",
    )
    add_flags(parser, ProfileSettings)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run pi-profile and return its exit code."""
    return cli.run(build_parser(), _command, argv)


def _command(args: argparse.Namespace) -> None:
    flags = given_flags(args, ProfileSettings)
    if args.model == REPORT:
        if flags or args.config:
            raise UsageError("a report has no settings", hint="pi-profile report OUT")
        return _report(args)
    if args.json or args.plot:
        raise UsageError("--json and --plot belong to a report", hint="pi-profile report OUT")
    values = read_yaml(args.config, "profile") if args.config else {}
    settings = resolve(ProfileSettings, values, flags, str(args.config))
    require_train_extra("pi-profile")
    speaks()
    from powerinfer_toolkit.profile_activations.profile import profile
    from powerinfer_toolkit.statistics import FILE_NAME

    if (args.output / FILE_NAME).exists() and not args.force:
        raise PiError(f"{args.output / FILE_NAME} exists already", hint="--force replaces it")
    with only_run(args.output):
        statistics = profile(args.model, args.output, settings)
    console.info(
        f"{statistics.n_tokens} tokens, {statistics.zero_share().mean():.2%} zeros; "
        f"next: pi-profile report {shlex.quote(str(args.output))}"
    )


def _report(args: argparse.Namespace) -> None:
    from powerinfer_toolkit.profile_activations import report
    from powerinfer_toolkit.statistics import ActivationStatistics

    statistics = ActivationStatistics.load(args.output)
    print(report.to_json(statistics) if args.json else report.to_text(statistics))
    if args.plot:
        from powerinfer_toolkit.profile_activations.plots import write_plots

        for path in write_plots(statistics, args.plot, args.plot_format):
            console.info(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
