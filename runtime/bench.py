"""pi-bench: tokens per second of prompts and of decoding, beside what the machine's memory allows."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from powerinfer_toolkit import cli, console
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.runtime.options import (
    add_model_options,
    check_gpu_options,
    plan_options,
    require_models,
    vram_budgets,
)
from powerinfer_toolkit.runtime.synth.command import add_synth_command

if TYPE_CHECKING:
    from powerinfer_toolkit.runtime.bench_report import Rates, Result
    from powerinfer_toolkit.runtime.model import Model
    from powerinfer_toolkit.runtime.plan.bandwidth import Bandwidth
    from powerinfer_toolkit.runtime.plan.planner import PlanOptions

DESCRIPTION = """
Measure models. Test ppN computes a prompt of N tokens; tgN decodes N tokens one by one, greedily, from an
empty context. tok/s is the median over the repetitions after one warm-up, spread is (fastest - slowest) /
median, active the share of FFN neurons whose up and down rows mattered. Of decoding it says what a token reads,
at what rate, and the share reached of the bound: the speed if that were read as fast as a stand-alone kernel
reads memory, docs/bench.md. `pi-bench synth` writes models of known shapes to measure.
"""
SEED = 1  # of the random tokens
DEFAULT_PROMPT, DEFAULT_DECODE = [512], [128]
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?")
_MOST_NUMBERS = 1000  # in one range
Test = tuple[str, int]  # "pp" or "tg", and the number of tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return cli.run(build_parser(), _command, argv)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of pi-bench."""
    parser = cli.new_parser("pi-bench", " ".join(DESCRIPTION.split()))
    _add_tests(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object, see docs/bench.md"
    )
    group.add_argument("--markdown", action="store_true", help="print a Markdown table")
    group.add_argument(
        "--measure-bandwidth",
        action="store_true",
        help="forget how fast memory was ever read here and measure it anew (default: the best of all runs)",
    )
    add_model_options(parser, several=True)
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", help="synth: write a model to measure"
    )
    add_synth_command(commands)
    return parser


def _add_tests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tests")
    lists = "a list like 128,512 or a range like 128-512*2 or 1-4+1"
    for names, dest, text in (
        (("-p", "--n-prompt"), "n_prompt", f"tokens of the prompt tests, {lists}; 0: none (512)"),
        (("-n", "--n-gen"), "n_gen", "tokens of the decode tests, the same; 0: none (128)"),
        (
            ("-t", "--threads"),
            "threads",
            "thread counts (physical cores that this process may use)",
        ),
    ):
        group.add_argument(
            *names, dest=dest, type=_numbers, action="extend", metavar="N", help=text
        )
    group.add_argument(
        "-r",
        "--repetitions",
        type=int,
        default=5,
        metavar="N",
        help="runs of every test after the warm-up (default %(default)s)",
    )


def _numbers(text: str) -> list[int]:
    """Parse a list as llama-bench takes it: numbers and ranges FIRST-LAST, FIRST-LAST+STEP, FIRST-LAST*FACTOR."""
    numbers: list[int] = []
    for part in text.split(","):
        if re.fullmatch(r"-\d+", part):
            raise argparse.ArgumentTypeError(f"{text!r} has a negative number")
        found = _RANGE.fullmatch(part)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers")
        first, last = int(found[1]), int(found[2] or found[1])
        numbers += _range(text, first, last, found[3] or "+", int(found[4] or 1))
    return numbers


def _range(text: str, first: int, last: int, sign: str, step: int) -> list[int]:
    stands = step < 2 or first == 0 if sign == "*" else step == 0
    if last < first or (last > first and stands):
        raise argparse.ArgumentTypeError(f"{text!r} has a range that never ends")
    numbers = [first]
    while (
        not stands and (after := numbers[-1] * step if sign == "*" else numbers[-1] + step) <= last
    ):
        if len(numbers) == _MOST_NUMBERS:
            raise argparse.ArgumentTypeError(f"{text!r} has a range of more than {_MOST_NUMBERS}")
        numbers.append(after)
    return numbers


def _command(args: argparse.Namespace) -> None:
    if args.command is not None:
        return args.run(args)  # type: ignore[no-any-return]
    check_gpu_options(args)
    paths = require_models(args)
    n_prompt, n_gen = args.n_prompt or DEFAULT_PROMPT, args.n_gen or DEFAULT_DECODE
    tests = [("pp", n) for n in n_prompt if n] + [("tg", n) for n in n_gen if n]
    if args.repetitions < 1 or not tests:
        raise UsageError("nothing to measure", hint="give -r of at least 1, and -p or -n above 0")
    if args.json and args.markdown:
        raise UsageError("--json and --markdown exclude each other", hint="give one of them")
    context = max(n for _, n in tests)
    plans = [
        plan_options(args, threads, context, budget)
        for budget in vram_budgets(args)
        for threads in args.threads or [None]
    ]
    runs = [(path, options) for path in paths for options in plans]
    with cli.uninterrupted():
        from powerinfer_toolkit.runtime.actions import check_run
    for path, options in runs:  # what is refused is refused before the first measurement
        check_run(path, options)
    decodes = any(kind == "tg" for kind, _ in tests)
    rates = _rates(args, runs) if decodes else None
    _measure_all(args, runs, tests, rates)


def _rates(args: argparse.Namespace, runs: list[tuple[str, PlanOptions]]) -> Rates:
    """Measure how fast the machine reads, its GPU too where a run uses it."""
    from powerinfer_toolkit.runtime.bench_report import Rates
    from powerinfer_toolkit.runtime.plan.surroundings import look

    bandwidth = _bandwidth(again=args.measure_bandwidth)
    on_gpu = next((options for _, options in runs if options.vram_budget_bytes), None)
    profile = look(on_gpu, again=args.measure_bandwidth).profile if on_gpu else None
    return Rates(bandwidth, profile)


def _bandwidth(*, again: bool) -> Bandwidth:
    from powerinfer_toolkit.runtime.plan.bandwidth import read_bandwidth
    from powerinfer_toolkit.runtime.plan.machine import probe

    return read_bandwidth(probe(), again=again)


def _measure_all(
    args: argparse.Namespace,
    runs: list[tuple[str, PlanOptions]],
    tests: list[Test],
    rates: Rates | None,
) -> None:
    from powerinfer_toolkit.runtime.bench_report import Report
    from powerinfer_toolkit.runtime.model import Model
    from powerinfer_toolkit.runtime.report import reset_peak_rss

    report = Report(
        rates,
        markdown=args.markdown,
        several=len({path for path, _ in runs}) > 1,
        on_gpu=any(options.vram_budget_bytes for _, options in runs),
    )
    results = []
    for path, options in runs:
        reset_peak_rss()
        with Model.open(path, options) as model:
            console.detail(f"{model.plan.n_threads} threads, {model.stats().isa} kernels")
            for test in tests:
                result = _measure(model, test, args.repetitions, rates)
                results.append(result)
                report.warn(result)
                if not args.json:
                    report.print_row(result)
    if args.json:
        print(json.dumps(report.record(results)))


def _measure(model: Model, test: Test, repetitions: int, rates: Rates | None) -> Result:
    from powerinfer_toolkit.runtime.bench_report import Result
    from powerinfer_toolkit.runtime.report import peak_rss_bytes

    kind, n = test
    run: Callable[[Model, int], None] = _prompt if kind == "pp" else _decode
    run(model, n)
    model.engine.reset_stats()
    speeds = []
    for _ in range(repetitions):
        start = time.perf_counter()
        run(model, n)
        speeds.append(n / (time.perf_counter() - start))
    median = statistics.median(speeds)
    stats = model.stats()
    read, bound = _bound(model, n, rates) if rates and kind == "tg" else (None, None)
    return Result(
        model=Path(model.file.path).name,
        test=f"{kind}{n}",
        threads=model.plan.n_threads,
        isa=stats.isa,
        device=stats.device,
        tok_s=median,
        tok_s_min=min(speeds),
        tok_s_max=max(speeds),
        tok_s_std=statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        spread=(max(speeds) - min(speeds)) / median,
        ffn_mode=model.plan.ffn_mode.name.lower(),
        active_share=stats.active_share,
        guessed_share=stats.guessed_share,
        bytes_per_token=read,
        bytes_per_second=None if read is None else read * median,
        bound_tok_s=bound,
        bound_share=None if bound is None else median / bound,
        peak_rss_bytes=peak_rss_bytes(),
        vram_budget_bytes=model.plan.vram_budget_bytes,
        device_bytes=stats.device_bytes,
    )


def _bound(model: Model, n: int, rates: Rates) -> tuple[float, float]:
    """Return (bytes that one of the first n tokens reads on average, tok/s at most), by what the engine counted."""
    from powerinfer_toolkit.runtime.plan.cost import Shares, bound_seconds, token_cost

    stats, profile = model.stats(), rates.profile
    shares = Shares(stats.active_share, stats.guessed_share)
    positions = (n + 1) / 2
    cost = token_cost(model.config, model.plan, profile, shares=shares, n_positions=positions)
    return cost.n_bytes, 1 / bound_seconds(cost, profile)


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
            model.engine.run(Batch([token], want_logits=True, want_top=sampler.n_top()))
            token, _ = sampler.sample(model.engine)


if __name__ == "__main__":
    raise SystemExit(main())
