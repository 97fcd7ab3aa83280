"""The things pi-run does with a model: plan only, complete, chat, perplexity."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.runtime import layer_report, native_lib, plan_report, report
from powerinfer_toolkit.runtime.generate import Generation
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.options import plan_options
from powerinfer_toolkit.runtime.perplexity import cut_windows, measure
from powerinfer_toolkit.runtime.plan.gpu import plan_run
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.planner import PlanOptions
from powerinfer_toolkit.runtime.plan.surroundings import look
from powerinfer_toolkit.runtime.record import recording
from powerinfer_toolkit.runtime.sampling import Sampling


def open_model(path: str, options: PlanOptions) -> Model:
    """Open and plan, say the plan, then allocate."""
    file = ModelFile(path)
    try:
        machine = look(options)
        plan = plan_run(file.shape, options, machine)
        isa = native_lib.select_isa(plan.isa)
    except BaseException:
        file.close()
        raise
    if console.verbosity() >= console.VERBOSE:
        console.detail(plan_report.plan_table(file.shape, plan, machine, isa))
        if not plan.uses_gpu and native_lib.load().pi_gpu_count() > 0:
            console.detail("a GPU is here and not used: --vram-budget says how much of it may be")
    else:
        console.info(plan_report.plan_line(file.shape, plan))
    for warning in plan_report.warnings(file.shape, plan, machine):
        console.warning(warning)
    return Model(file, plan)


def check_run(path: str, options: PlanOptions) -> None:
    """Plan a run without allocating anything, and raise what is refused."""
    with ModelFile(path) as file:
        native_lib.select_isa(plan_run(file.shape, options, look(options)).isa)


@contextmanager
def open_for(args: argparse.Namespace) -> Iterator[Model]:
    """Open the model that the flags name, recording its activations where they say so."""
    options = _options(args)
    with open_model(args.model, options) as model, recording(model, args.record_activations):
        yield model


def _options(args: argparse.Namespace) -> PlanOptions:
    return plan_options(args, args.threads, args.ctx_size, args.vram_budget)


def dry_run(args: argparse.Namespace) -> None:
    """Print the plan to stdout."""
    options = _options(args)
    with ModelFile(args.model) as file:
        machine = look(options) if args.machine is None else _described(args.machine, options)
        plan = plan_run(file.shape, options, machine)
        if args.json:
            print(plan_report.dry_run_record(file.shape, plan, machine))
        else:
            isa = native_lib.select_isa(plan.isa)
            print(plan_report.plan_table(file.shape, plan, machine, isa))


def _described(path: Path, options: PlanOptions) -> Machine:
    machine = Machine.from_json(_read_text(str(path)))
    if options.vram_budget_bytes and machine.device is None:
        raise UsageError(
            f"{path} describes no GPU, which --vram-budget could be of",
            hint="add its device, docs/plan.md, or leave --vram-budget out",
        )
    return machine


def complete(args: argparse.Namespace) -> None:
    """Print what follows the prompt, then timings or the JSON record."""
    prompt, options = read_prompt(args), generate_options(args)
    start = time.perf_counter()
    with open_for(args) as model:
        tokens = model.tokenizer.encode(prompt)
        load_seconds = time.perf_counter() - start
        generation = model.generate(tokens, **options)
        print_generation(args, model, generation, load_seconds)


def chat(args: argparse.Namespace) -> None:
    """Answer the prompt, or the messages of stdin one after the other."""
    from powerinfer_toolkit.runtime.chat import Chat, Repl

    prompted = args.prompt is not None or args.file is not None
    if args.json and not prompted:
        raise UsageError("--json prints one answer", hint="give the message with -p or -f")
    message = read_prompt(args) if prompted else ""
    options = generate_options(args)
    start = time.perf_counter()
    with open_for(args) as model:
        conversation = Chat(model, system=args.system_prompt or "", **options)
        load_seconds = time.perf_counter() - start
        if prompted:
            generation = model.generate(conversation.prompt_tokens(message), **options)
            print_generation(args, model, generation, load_seconds)
        else:
            Repl(conversation).run()


def perplexity(args: argparse.Namespace) -> None:
    """Print the perplexity of a text file."""
    text = _read_text(args.perplexity)
    with open_for(args) as model:
        windows = cut_windows(model, text, args.window, args.chunks)
        shown = console.progress(windows, total=len(windows), label="perplexity", unit="window")
        result = measure(model, shown)
        ffn_mode, active_share = model.plan.ffn_mode.name.lower(), model.stats().active_share
    if args.json:
        record = {
            "perplexity": result.value,
            "tokens": result.n_tokens,
            "ffn_mode": ffn_mode,
            "active_share": active_share,
        }
        print(json.dumps(record))
    else:
        print(f"perplexity {result.value:.4f} over {result.n_tokens} tokens")
        console.info(f"ffn {ffn_mode}, {active_share:.1%} active")


def print_generation(
    args: argparse.Namespace, model: Model, generation: Generation, load_seconds: float
) -> None:
    """Run a generation to its end: stream its text or print the JSON record, then say the timings."""
    timed = args.json or console.verbosity() >= console.VERBOSE
    text = _stream(generation, io.StringIO() if args.json else sys.stdout, model if timed else None)
    if args.json:
        record = report.generation_record(model, generation, text, load_seconds)
        print(json.dumps(record, ensure_ascii=False))
    else:
        print(flush=True)
    if generation.finish_reason == "context":
        limit = model.plan.n_context
        console.warning(f"the context of {limit} tokens is full; a larger one is asked for with -c")
    console.detail(f"seed {generation.seed}, loaded in {load_seconds:.2f} s")
    stats = model.stats()
    if stats.device:
        for line in layer_report.times_lines(layer_report.times_record(model)):
            console.detail(line)
        console.detail(report.device_line(stats, model.plan))
    console.info(report.timing_line(generation, stats, model.plan.ffn_mode.name.lower()))


def _stream(generation: Generation, out: TextIO, timed: Model | None) -> str:
    """Write the text as it comes and return all of it; what came before Ctrl-C is flushed.

    The layers of `timed` are timed after the first token, which is the prompt's.
    """
    pieces: list[str] = []
    for token in generation:
        if timed and timed.plan.uses_gpu and not pieces:
            timed.engine.time_layers(True)
        pieces.append(token.text)
        out.write(token.text)
        out.flush()
    out.write(generation.remainder)
    return "".join(pieces) + generation.remainder


def generate_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of Model.generate that have flags."""
    seed = None if args.seed == -1 else args.seed
    sampling = Sampling(
        repeat_penalty=args.repeat_penalty,
        repeat_last_n=args.repeat_last_n,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        temperature=args.temp,
        seed=seed,
    )
    return {"sampling": sampling, "n_predict": args.n_predict, "ignore_eos": args.ignore_eos}


def read_prompt(args: argparse.Namespace) -> str:
    """Return the text of -p, -f or stdin; a file and stdin lose one newline at their end, as in llama.cpp.

    UsageError when there is none.
    """
    if args.file is not None:
        return _read_text(args.file).removesuffix("\n")
    if args.prompt not in (None, "-"):
        return str(args.prompt)
    if args.prompt is None and sys.stdin.isatty():
        raise UsageError(
            "no prompt", hint="give -p TEXT, -f FILE or --chat, or pipe a text into stdin"
        )
    return _decode(sys.stdin.buffer.read(), "stdin").removesuffix("\n")


def _read_text(path: str) -> str:
    return _decode(Path(path).read_bytes(), path)


def _decode(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise PiError(
            f"{name} is not UTF-8: {failure.reason} at byte {failure.start}",
            hint="give a text in UTF-8; iconv converts others",
        ) from failure
