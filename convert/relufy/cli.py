"""pi-relufy: a dense model becomes a ReLU-sparse one."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from powerinfer_toolkit import cli, console
from powerinfer_toolkit import settings as schema
from powerinfer_toolkit.artifact import only_run
from powerinfer_toolkit.convert.relufy.settings import RelufySettings, check
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.training import calm_libraries

SECTION = "relufy"  # of a recipe


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of pi-relufy."""
    parser = cli.new_parser(
        "pi-relufy",
        "Swap the FFN activation of a dense Hugging Face model for a sparse one and fine-tune it against "
        "the dense model. The same command continues an interrupted run.",
    )
    parser.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG.yaml", help="settings, or a recipe"
    )
    parser.add_argument(
        "--config", dest="config_flag", type=Path, metavar="CONFIG.yaml", help="the same as a flag"
    )
    parser.add_argument(
        "--restart", action="store_true", help="delete what the run has written and begin anew"
    )
    schema.add_flags(parser, RelufySettings)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run pi-relufy and return its exit code."""
    return cli.run(build_parser(), _command, argv)


def read_settings(args: argparse.Namespace) -> RelufySettings:
    """Return the settings of a parsed command line. Raises UsageError."""
    if args.config and args.config_flag:
        raise UsageError("the configuration is named twice", hint="name one file")
    path = args.config or args.config_flag
    values = schema.read_yaml(path, SECTION) if path else {}
    flags = schema.given_flags(args, RelufySettings)
    settings = schema.resolve(RelufySettings, values, flags, str(path))
    check(settings)
    return settings


def _command(args: argparse.Namespace) -> None:
    settings = read_settings(args)
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        console.set_verbosity(console.QUIET)
    try:
        from powerinfer_toolkit.convert.relufy.run import relufy
    except ImportError as failure:
        raise PiError(
            f"pi-relufy needs the package {failure.name}",
            hint="pip install 'powerinfer-toolkit[train]'",
        ) from failure
    if not args.verbose:
        calm_libraries()
    console.detail(schema.to_yaml(settings))
    with only_run(Path(settings.output_dir)):
        folder = relufy(settings, restart=args.restart)
    if not rank:
        print(folder)
        console.info(f"next: pi-convert {shlex.quote(str(folder))} MODEL.gguf")
