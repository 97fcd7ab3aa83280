"""pi-recipe: from a dense model to a verified sparse file, by one YAML file."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from powerinfer_toolkit import cli, console
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.recipes import catalog

DESCRIPTION = """
Recipes: one YAML file from a dense model to a sparse one with predictors, packed, verified and measured, with a section
of settings for every stage.
"""
NAMED = "shipped recipe, or a YAML file"
OVERRIDES = "Any setting of a section can be given as a flag: --relufy.max_steps 10."
STAGE_NAMES = ("synthetic", "relufy", "profile", "train_predictor", "convert", "verify")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of pi-recipe."""
    from powerinfer_toolkit.recipes.recipe import add_flags

    parser = cli.new_parser("pi-recipe", " ".join(DESCRIPTION.split()))
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help="ls, show, cp, validate or run"
    )
    cli.add_command(
        commands, "ls", "List the shipped recipes: name, model, variant, a line of text."
    )
    show = cli.add_command(
        commands, "show", f"Print a recipe with every setting, defaults too. {OVERRIDES}"
    )
    copy = cli.add_command(commands, "cp", "Copy a shipped recipe, to edit it.")
    validate = cli.add_command(
        commands,
        "validate",
        "Check a recipe without weights, network or torch: settings of all stages, contradictions between them, "
        f"paths. {OVERRIDES}",
    )
    run = cli.add_command(
        commands,
        "run",
        "Run the stages of a recipe one after the other, from where they are, and print what came out. The same "
        f"command continues an interrupted run; what is finished and unchanged is skipped. {OVERRIDES}",
    )
    for command in (show, copy, validate, run):
        command.add_argument("recipe", metavar="RECIPE", help=NAMED)
    copy.add_argument("file", metavar="FILE", type=Path, help="file to write")
    _add_run(run)
    for command in (show, validate, run):
        add_flags(command)
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--output_dir", required=True, metavar="OUT", type=Path, help="directory of the run"
    )
    run.add_argument(
        "--restart",
        metavar="STAGE",
        choices=STAGE_NAMES,
        help=f"make a stage anew with all that follow: {', '.join(STAGE_NAMES)}",
    )
    run.add_argument("--json", action="store_true", help="print one JSON object, not a table")


def main(argv: Sequence[str] | None = None) -> int:
    """Run pi-recipe and return its exit code."""
    return cli.run(build_parser(), _command, argv)


def _command(args: argparse.Namespace) -> None:
    commands = {"ls": _ls, "show": _show, "cp": _cp, "validate": _validate, "run": _run}
    commands[args.command](args)


def _ls(_args: argparse.Namespace) -> None:
    from powerinfer_toolkit.recipes.recipe import OUTPUT_DIR, read

    rows = []
    for name in catalog.shipped():
        recipe = read(name)
        relufy = recipe.settings["relufy"]
        model = relufy.model_name_or_path.removeprefix(f"{OUTPUT_DIR}/")
        rows.append((name, model, relufy.variant, recipe.description))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip())


def _show(args: argparse.Namespace) -> None:
    from powerinfer_toolkit.recipes.recipe import given_flags, read

    print(read(args.recipe, given_flags(args)).to_yaml(), end="")


def _cp(args: argparse.Namespace) -> None:
    from powerinfer_toolkit.recipes.run import copy

    _, path = catalog.find(args.recipe)
    copy(path, args.file)
    console.info(f"next: edit {args.file}, then pi-recipe validate {shlex.quote(str(args.file))}")


def _validate(args: argparse.Namespace) -> None:
    from powerinfer_toolkit.recipes import checks
    from powerinfer_toolkit.recipes.recipe import given_flags, read

    recipe = read(args.recipe, given_flags(args))
    checks.check(recipe)
    for path in [*checks.missing_models(recipe.settings), *checks.missing_texts(recipe.settings)]:
        console.warning(f"there is nothing at {path} yet")
    print(f"{recipe.name}: {', '.join(recipe.settings)}")


def _run(args: argparse.Namespace) -> None:
    import json

    from powerinfer_toolkit.recipes.recipe import given_flags, read
    from powerinfer_toolkit.training import calm_libraries, require_train_extra, speaks

    flags = given_flags(args)
    if "output_dir" in flags["relufy"]:
        raise UsageError("--relufy.output_dir is for pi-relufy", hint="--output_dir is the run's")
    recipe = read(args.recipe, flags)
    require_train_extra("pi-recipe run")
    speaks()
    if not args.verbose:
        calm_libraries()
    from powerinfer_toolkit.recipes.run import run_recipe

    results = run_recipe(recipe, args.output_dir, restart=args.restart)
    if results is not None:
        print(json.dumps(results.to_mapping()) if args.json else results.to_text())


if __name__ == "__main__":
    raise SystemExit(main())
