"""pi-bench: tokens per second of prompts and of decoding, by thread count."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from powerinfer_toolkit import cli, console
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.runtime.options import (
    add_model_options,
    check_gpu_options,
    plan_options,
    require_model,
)

if TYPE_CHECKING:
    from powerinfer_toolkit.runtime.model import Model

DESCRIPTION = """
Measure a model. Test ppN computes a prompt of N tokens; tgN decodes N tokens one by one, greedily, from an
empty context. tok_s is the median over the repetitions after one warm-up, spread is (fastest - slowest) /
median. active_share is the share of FFN neurons whose up and down rows mattered.
"""
SEED = 1  # of the random tokens


@dataclass(frozen=True)
class Result:
    """One row: a test at a thread count."""

    test: str
    threads: int
    tok_s: float
    spread: float
    ffn_mode: str
    active_share: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return cli.run(build_parser(), _command, argv)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of pi-bench."""
    parser = cli.new_parser("pi-bench", " ".join(DESCRIPTION.split()))
    group = parser.add_argument_group("tests")
    lists = "numbers separated by commas"
    group.add_argument(
        "-p",
        "--n-prompt",
        type=_numbers,
        default=[512],
        metavar="N",
        help=f"tokens of the prompt tests, {lists}; 0: none (default 512)",
    )
    group.add_argument(
        "-n",
        "--n-gen",
        type=_numbers,
        default=[64],
        metavar="N",
        help=f"tokens of the decode tests, {lists}; 0: none (default 64)",
    )
    group.add_argument(
        "-t",
        "--threads",
        type=_numbers,
        metavar="N",
        help=f"thread counts, {lists} (default: physical cores that this process may use)",
    )
    group.add_argument(
        "-r",
        "--repetitions",
        type=int,
        default=5,
        metavar="N",
        help="runs of every test after the warm-up (default %(default)s)",
    )
    group.add_argument(
        "--json",
        action="store_true",
        help='print {"results": [{test, threads, tok_s, spread, ffn_mode, active_share}, ...]}',
    )
    add_model_options(parser)
    return parser


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} has a negative number")
    return numbers


def _command(args: argparse.Namespace) -> None:
    check_gpu_options(args)
    path = require_model(args)
    tests = [("pp", n) for n in args.n_prompt if n] + [("tg", n) for n in args.n_gen if n]
    if args.repetitions < 1 or not tests:
        raise UsageError("nothing to measure", hint="give -r of at least 1, and -p or -n above 0")
    context = max(n for _, n in tests)
    plans = [plan_options(args, threads, context) for threads in args.threads or [None]]
    with cli.uninterrupted():
        from powerinfer_toolkit.runtime.model import Model
    for options in plans:  # what is refused is refused before the first measurement
        Model.open(path, options).close()
    results = []
    for options in plans:
        with Model.open(path, options) as model:
            console.detail(f"{model.plan.n_threads} threads, {model.stats().isa} kernels")
            for kind, n in tests:
                results.append(_measure(model, kind, n, args.repetitions))
                if not args.json:
                    _print_row(results[-1], header=len(results) == 1)
    if args.json:
        print(json.dumps({"results": [asdict(result) for result in results]}))


def _measure(model: Model, kind: str, n: int, repetitions: int) -> Result:
    run: Callable[[Model, int], None] = _prompt if kind == "pp" else _decode
    run(model, n)
    model.engine.reset_stats()
    speeds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run(model, n)
        speeds.append(n / (time.perf_counter() - start))
    median = statistics.median(speeds)
    return Result(
        test=f"{kind}{n}",
        threads=model.plan.n_threads,
        tok_s=median,
        spread=(max(speeds) - min(speeds)) / median,
        ffn_mode=model.plan.ffn_mode.name.lower(),
        active_share=model.stats().active_share,
    )


def _prompt(model: Model, n: int) -> None:
    """Compute a prompt of n random tokens and the logits of the last one."""
    import numpy as np

    model.forget()
    model.start_text(np.random.default_rng(SEED).integers(0, model.config.n_vocab, n).tolist())


def _decode(model: Model, n: int) -> None:
    """Compute n steps of one token, each the likeliest after the last: a text that the model would write."""
    from powerinfer_toolkit.runtime.engine import Batch
    from powerinfer_toolkit.runtime.sampling import Sampler, Sampling

    model.forget()
    with Sampler(Sampling(temperature=0)) as sampler:
        token = SEED % model.config.n_vocab
        for _ in range(n):
            model.engine.run(Batch([token], want_logits=True))
            token, _ = sampler.sample(model.engine)


def _print_row(result: Result, *, header: bool) -> None:
    if header:
        print(f"{'test':<8} {'threads':>7} {'tok/s':>10} {'spread':>7} {'ffn':>9} {'active':>7}")
    print(
        f"{result.test:<8} {result.threads:>7} {result.tok_s:>10.2f} {result.spread:>7.1%} "
        f"{result.ffn_mode:>9} {result.active_share:>7.1%}",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
