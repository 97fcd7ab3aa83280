"""pi-verify: does a model file compute what its checkpoint computes?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from powerinfer_toolkit import cli
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.recipes.verify.report import to_tables
from powerinfer_toolkit.recipes.verify.settings import VerifySettings
from powerinfer_toolkit.settings import add_flags, given_flags, read_yaml, resolve
from powerinfer_toolkit.training import require_train_extra

SECTION = "verify"  # of a recipe
DESCRIPTION = """
Compare a model file with the checkpoint it was made from: tokenizer, weights, logits and perplexity, first against
the checkpoint in transformers, then against transformers with the file's own weights, which tells faults from the
loss of a coarse type. Where the file has predictors, also the perplexity of --ffn predicted against the same masks
in transformers. Exit code 0: everything is within its limit; 1: something is not, or could not be compared (then
stdout is empty).
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of pi-verify."""
    parser = cli.new_parser("pi-verify", " ".join(DESCRIPTION.split()))
    parser.add_argument(
        "checkpoint", metavar="HF_DIR", help="checkpoint directory or ID[@REVISION] of the hub"
    )
    parser.add_argument("model_file", metavar="FILE", type=Path, help="GGUF file made from it")
    parser.add_argument("--config", metavar="FILE", type=Path, help="YAML file with settings")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not tables")
    add_flags(parser, VerifySettings)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run pi-verify and return its exit code."""
    return cli.run(build_parser(), _command, argv)


def _command(args: argparse.Namespace) -> None:
    values = read_yaml(args.config, SECTION) if args.config else {}
    flags = given_flags(args, VerifySettings)
    settings = resolve(VerifySettings, values, flags, str(args.config))
    require_train_extra("pi-verify")
    with cli.uninterrupted():
        from powerinfer_toolkit.recipes.verify.comparison import compare

    report = compare(args.checkpoint, args.model_file, settings)
    print(json.dumps(report) if args.json else to_tables(report))
    failed = [check["name"] for check in report["checks"] if not check["passed"]]
    if failed:
        raise PiError(
            f"{report['file']} does not match {report['checkpoint']}: {'; '.join(failed)}",
            hint="docs/evaluation.md says where the limits come from",
        )


if __name__ == "__main__":
    raise SystemExit(main())
