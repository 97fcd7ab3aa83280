"""pi-run: complete a prompt, chat, measure perplexity, or say what would be done."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from powerinfer_toolkit import cli
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.runtime.options import add_model_options, check_gpu_options, require_model

DESCRIPTION = """
Run a model. Generated text goes to stdout, everything else to stderr. The prompt is the text of -p or -f, or
what is piped into stdin, as it is; --chat wraps it in the model's chat template.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return cli.run(build_parser(), _command, argv)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of pi-run."""
    parser = cli.new_parser("pi-run", " ".join(DESCRIPTION.split()), _describe_build)
    _add_prompt_options(parser)
    _add_sampling_options(parser)
    _add_context_options(parser)
    add_model_options(parser)
    _add_action_options(parser)
    return parser


def _add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    source = group.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads stdin")
    source.add_argument(
        "-f",
        "--file",
        metavar="FILE",
        help="read the prompt from a file, less one newline at its end",
    )
    group.add_argument(
        "-i",
        "--chat",
        action="store_true",
        help="chat with the model's template: with a prompt answer it and end, else read messages from stdin, "
        "one a line",
    )
    group.add_argument(
        "-sys", "--system-prompt", metavar="TEXT", help="system message of the chat (default: none)"
    )
    group.add_argument(
        "-n",
        "--n-predict",
        type=int,
        default=-1,
        metavar="N",
        help="most tokens to generate; -1 and -2: until the end of generation or a full context "
        "(default %(default)s)",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on after end-of-generation tokens"
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling, in the order of use")

    def add(*names: str, kind: type, default: float, text: str) -> None:
        settled = f"{text} (default %(default)s)"
        group.add_argument(*names, type=kind, default=default, metavar="N", help=settled)

    add(
        "--repeat-penalty", kind=float, default=1.0, text="divide the odds of recent tokens; 1: off"
    )
    add("--repeat-last-n", kind=int, default=64, text="tokens that count as recent; -1: all")
    add("--top-k", kind=int, default=40, text="keep the N likeliest tokens; 0: all")
    add(
        "--top-p", kind=float, default=0.95, text="keep the likeliest tokens up to this sum; 1: all"
    )
    add(
        "--min-p",
        kind=float,
        default=0.05,
        text="drop what is less likely than N x the best; 0: off",
    )
    add("--temp", kind=float, default=0.8, text="temperature; 0 takes the likeliest token")
    add("-s", "--seed", kind=int, default=-1, text="seed of the draws; -1: a new one each time")


def _add_context_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("size")
    group.add_argument(
        "-t",
        "--threads",
        type=int,
        metavar="N",
        help="threads (default: physical cores that this process may use)",
    )
    group.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        metavar="N",
        help="context in tokens; 0: all the model was trained for (default 4096, or less where the model was "
        "trained for less)",
    )


def _add_action_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to do and print")
    group.add_argument(
        "--perplexity",
        metavar="FILE",
        help="print exp of the mean negative log-likelihood of all predicted tokens of a text, cut into "
        "windows that do not overlap, each after BOS where the model has it; tokens are computed as decoding "
        "computes them",
    )
    group.add_argument(
        "--window",
        type=int,
        metavar="N",
        help="tokens of a perplexity window, BOS included (default 512, at most the context)",
    )
    group.add_argument(
        "--chunks",
        type=int,
        default=-1,
        metavar="N",
        help="measure only the first N windows; -1: all (default %(default)s)",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object at the end: text, token_ids, prompt_tokens, decode_tokens (after the first), "
        "prompt_seconds (up to the first token), decode_seconds, ffn_mode, active_share, load_seconds, peak_rss_bytes, device, "
        "device_bytes, vram_budget_bytes, layers (with a GPU: what each side of a layer did, mean seconds of a decoded "
        "token); with "
        "--perplexity: perplexity, tokens, ffn_mode, active_share; with --dry-run: the plan and what is expected of it",
    )
    group.add_argument(
        "--record-activations",
        metavar="OUT",
        type=Path,
        help="count which FFN neurons fire, as pi-profile does, and write it to OUT (.safetensors), added to what "
        "OUT holds of this model; needs --ffn exact or dense",
    )
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and allocate nothing: sizes and, with --vram-budget, where every layer and its neurons "
        "are, what is read there and which side waits; exit code 3 if it does not fit",
    )
    group.add_argument(
        "--machine",
        metavar="FILE",
        type=Path,
        help="plan --dry-run for the machine that a JSON file describes, docs/plan.md (default: this one)",
    )
    group.add_argument(
        "--doctor",
        action="store_true",
        help="say what is here, what is missing and why; checks -m too",
    )


def _describe_build() -> str:
    from powerinfer_toolkit.runtime.doctor import describe_build

    return describe_build()


def _command(args: argparse.Namespace) -> None:
    check_gpu_options(args)
    _check_combination(args)
    if args.doctor:
        with cli.uninterrupted():
            from powerinfer_toolkit.runtime import doctor

        return doctor.examine(args.model)
    require_model(args)
    with cli.uninterrupted():
        from powerinfer_toolkit.runtime import actions

    if args.dry_run:
        return actions.dry_run(args)
    if args.perplexity:
        return actions.perplexity(args)
    if args.chat:
        return actions.chat(args)
    return actions.complete(args)


def _check_combination(args: argparse.Namespace) -> None:
    prompted = args.prompt is not None or args.file is not None
    if args.perplexity and (prompted or args.chat):
        raise UsageError(
            "--perplexity takes its text from its own file", hint="leave out -p, -f and --chat"
        )
    if (args.window is not None or args.chunks != -1) and not args.perplexity:
        raise UsageError(
            "--window and --chunks belong to --perplexity", hint="add --perplexity FILE"
        )
    if args.system_prompt is not None and not args.chat:
        raise UsageError("-sys needs --chat: a plain prompt has no messages", hint="add --chat")
    if args.machine is not None and not args.dry_run:
        raise UsageError("--machine describes what to plan for", hint="add --dry-run")
    if args.n_predict < -2:
        raise UsageError(f"n-predict {args.n_predict} is out of range", hint="give -2 or more")
    if args.seed < -1:
        raise UsageError(f"seed {args.seed} is out of range", hint="give -1 (random) or more")


if __name__ == "__main__":
    raise SystemExit(main())
