"""Our engine beside llama.cpp: same file, same threads, in alternation, each run in a process of its own.

    pip install xllamacpp                      # llama.cpp as a wheel, AVX2
    python benchmarks/peers/compare_llamacpp.py model.gguf --isa avx2
    npm install -E node-llama-cpp@3.21.1       # llama.cpp for the best instruction set, in any folder
    python benchmarks/peers/compare_llamacpp.py model.gguf --peer node-llama-cpp --node-modules FOLDER

Neither is a dependency of the package. The model must be one that llama.cpp runs (a plain dense GGUF).
Every round starts each engine once, the order turning from round to round; an engine warms up with one
run and measures the next: a prompt of N tokens in one batch, then M tokens one by one. Printed are the
medians over rounds in tokens per second of wall time, their spread (max - min) / median, and ours / peer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Speeds = dict[str, float]  # {"prompt": tok/s, "decode": tok/s}

NODE_SCRIPT = Path(__file__).with_name("node_llama_cpp.mjs")


def prompt_tokens(n_tokens: int, run: int) -> list[int]:
    """Return token ids that no cache of an earlier run holds; all below 40,100."""
    return [(i * 7919 + run) % 40000 + 100 for i in range(n_tokens)]


def measure_xllamacpp(model: str, threads: int, n_prompt: int, n_decode: int) -> Speeds:
    """Run llama.cpp's server in this process; the second of two requests counts."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = n_prompt + n_decode + 64
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    server = xllamacpp.Server(params)
    timings: dict[str, float] = {}
    for run in range(2):
        request = {
            "prompt": prompt_tokens(n_prompt, run),
            "n_predict": n_decode,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": True,
        }
        answer = server.handle_completions(request)
        timings = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
    assert timings["prompt_n"] == n_prompt, timings
    assert timings["predicted_n"] == n_decode, timings
    return {"prompt": timings["prompt_per_second"], "decode": timings["predicted_per_second"]}


def start(command: list[str], cwd: Path | None = None, isa: str = "") -> str:
    """Run one engine to its end and return its standard output."""
    env = os.environ | ({"PI_ISA": isa} if isa else {})
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def run_peer(args: argparse.Namespace, threads: int) -> Speeds:
    """Measure the peer once."""
    shape = [args.model, str(threads), str(args.prompt), str(args.decode)]
    if args.peer == "xllamacpp":
        return json.loads(start([sys.executable, __file__, "--worker", *shape]))
    script = args.node_modules / NODE_SCRIPT.name  # node looks for packages beside the script
    script.write_text(NODE_SCRIPT.read_text())
    return json.loads(start(["node", script.name, *shape], cwd=args.node_modules))


def run_ours(args: argparse.Namespace, threads: int) -> Speeds:
    """Measure `pi-bench` once."""
    command = [sys.executable, "-m", "powerinfer_toolkit.runtime.bench", "-m", args.model]
    command += [
        "-p",
        str(args.prompt),
        "-n",
        str(args.decode),
        "-t",
        str(threads),
        "-r",
        "1",
        "--json",
    ]
    results = json.loads(start(command, isa=args.isa))["results"]
    speed = {row["test"]: row["tok_s"] for row in results}
    return {"prompt": speed[f"pp{args.prompt}"], "decode": speed[f"tg{args.decode}"]}


def measure_all(args: argparse.Namespace) -> dict[int, dict[str, list[Speeds]]]:
    """Return the speeds of every round, by thread count and engine ("ours", "peer")."""
    engines: list[tuple[str, Callable[[argparse.Namespace, int], Speeds]]]
    engines = [("peer", run_peer), ("ours", run_ours)]
    speeds: dict[int, dict[str, list[Speeds]]] = {}
    for threads in args.threads:
        speeds[threads] = {"ours": [], "peer": []}
        for round_number in range(args.rounds):
            for name, run in engines if round_number % 2 else reversed(engines):
                speeds[threads][name].append(run(args, threads))
                print(f"{threads} threads, {name}: {speeds[threads][name][-1]}", file=sys.stderr)
    return speeds


def summarise(speeds: dict[int, dict[str, list[Speeds]]]) -> list[dict[str, float | str]]:
    """Return one row a thread count and test: medians, spreads, ratio of the medians."""
    rows: list[dict[str, float | str]] = []
    for threads, engines in speeds.items():
        for test in ("prompt", "decode"):
            row: dict[str, float | str] = {"threads": threads, "test": test}
            for name, rounds in engines.items():
                values = [speed[test] for speed in rounds]
                row[name] = statistics.median(values)
                row[f"{name}_spread"] = (max(values) - min(values)) / statistics.median(values)
            row["ratio"] = float(row["ours"]) / float(row["peer"])
            rows.append(row)
    return rows


def print_markdown(args: argparse.Namespace, rows: list[dict[str, float | str]]) -> None:
    """Print the table for benchmarks/RESULTS.md."""
    ours = f"ours, {args.isa}" if args.isa else "ours"
    print(f"| {Path(args.model).name} | threads | {ours} tok/s | {args.peer} tok/s | ratio |")
    print("|---|---|---|---|---|")
    for row in rows:
        test = f"prompt {args.prompt}" if row["test"] == "prompt" else f"decode {args.decode}"
        print(
            f"| {test} | {row['threads']} | {row['ours']:.1f} (spread {row['ours_spread']:.0%})"
            f" | {row['peer']:.1f} (spread {row['peer_spread']:.0%}) | {row['ratio']:.2f} |"
        )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="GGUF file that both engines run")
    parser.add_argument("--peer", choices=("xllamacpp", "node-llama-cpp"), default="xllamacpp")
    parser.add_argument(
        "--node-modules", type=Path, metavar="FOLDER", help="where npm installed it"
    )
    parser.add_argument("-p", "--prompt", type=int, default=512, help="prompt tokens (512)")
    parser.add_argument("-n", "--decode", type=int, default=64, help="decoded tokens (64)")
    parser.add_argument(
        "-t",
        "--threads",
        default=[1, 2],
        help="thread counts, e.g. 1,2",
        type=lambda text: [int(part) for part in text.split(",")],
    )
    parser.add_argument("-r", "--rounds", type=int, default=5, help="runs of each engine (5)")
    parser.add_argument("--isa", default="", help="PI_ISA for our engine: scalar, avx2, avx512")
    parser.add_argument("--json", action="store_true", help="every round and the summary as JSON")
    return parser


def main() -> None:
    """Compare, or (as --worker MODEL THREADS PROMPT DECODE) be the peer's process."""
    if sys.argv[1:2] == ["--worker"]:
        model, *numbers = sys.argv[2:]
        print(json.dumps(measure_xllamacpp(model, *map(int, numbers))))
        return
    args = build_parser().parse_args()
    args.model = str(Path(args.model).resolve())
    if args.peer == "node-llama-cpp" and args.node_modules is None:
        sys.exit("--peer node-llama-cpp needs --node-modules FOLDER")
    speeds = measure_all(args)
    if args.json:
        settings = {key: getattr(args, key) for key in ("model", "peer", "prompt", "decode", "isa")}
        print(json.dumps({**settings, "results": summarise(speeds), "rounds": speeds}, indent=1))
    else:
        print_markdown(args, summarise(speeds))


if __name__ == "__main__":
    main()
