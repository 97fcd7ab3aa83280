"""Our engine beside llama.cpp: same file, same threads, in alternation, each run in a process of its own.

    pip install xllamacpp                      # llama.cpp as a wheel, AVX2
    npm install -E node-llama-cpp@3.21.1       # llama.cpp for the best instruction set, in any folder
    python benchmarks/peers/compare_llamacpp.py model.gguf --peers xllamacpp node-llama-cpp --node-modules FOLDER
    python benchmarks/peers/compare_llamacpp.py 7b-dense.gguf --sparse 7b.gguf --peers node-llama-cpp --node-modules FOLDER

Neither is a dependency of the package. The model must be one that llama.cpp runs (a plain dense GGUF); with --sparse
our engine runs a ReLU-sparse file besides, in the modes of --ffn. Every round starts each engine once, A B C, B C A,
C A B, ...; an engine warms up with one run and measures the next: a prompt of N tokens in batches of 512, and M
tokens decoded greedily from an empty context. Printed are the medians over rounds in tokens per second of wall time
with their spread (max - min) / median, and the median of the rounds' ratios to every peer, least and largest in
brackets; at each thread count, and for every engine at its own best one. A peer's instruction sets are those that it
reports itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = ("prompt", "decode")
PEERS = ("xllamacpp", "node-llama-cpp")
NODE_SCRIPT = Path(__file__).with_name("node_llama_cpp.mjs")

Run = dict[str, Any]  # {"prompt": tok/s, "decode": tok/s, "isa": str}
Rounds = dict[str, list[Run]]  # by engine
ALL = "best"  # in place of a thread count


@dataclass(frozen=True)
class Engine:
    """One thing to measure: measure(threads) starts it once."""

    name: str
    measure: Callable[[int], Run]


def prompt_tokens(n_tokens: int, run: int, n_vocab: int) -> list[int]:
    """Return token ids that no earlier run has cached, above the special ones and bytes."""
    return [(i * 7919 + run) % (n_vocab - 300) + 300 for i in range(n_tokens)]


def measure_xllamacpp(model: str, threads: int, n_prompt: int, n_decode: int, n_vocab: int) -> Run:
    """Run llama.cpp's server in this process; the second of two rounds of requests counts."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = n_prompt + n_decode + 64
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    server = xllamacpp.Server(params)

    def complete(n_tokens: int, n_predict: int, run: int) -> dict[str, float]:
        request = {
            "prompt": prompt_tokens(n_tokens, run, n_vocab),
            "n_predict": n_predict,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": True,
        }
        answer: Any = server.handle_completions(request)
        timings = (json.loads(answer) if isinstance(answer, str) else answer)["timings"]
        assert (timings["prompt_n"], timings["predicted_n"]) == (n_tokens, n_predict), timings
        return timings

    result: Run = {"isa": xllamacpp.get_system_info()}
    for run in range(2):
        if n_prompt:
            result["prompt"] = complete(n_prompt, 1, run)["prompt_per_second"]
        if n_decode:
            result["decode"] = complete(1, n_decode, run)["predicted_per_second"]
    return result


def start(command: list[str], cwd: Path | None = None, isa: str = "") -> str:
    """Run one engine to its end and return its standard output."""
    env = os.environ | ({"PI_ISA": isa} if isa else {})
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=env)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def peer(name: str, args: argparse.Namespace) -> Engine:
    """Return llama.cpp in one of its packages."""

    def measure(threads: int) -> Run:
        shape = [args.model, *map(str, (threads, args.prompt, args.decode, args.n_vocab))]
        if name == "xllamacpp":
            return json.loads(start([sys.executable, __file__, "--worker", *shape]))
        script = args.node_modules / NODE_SCRIPT.name  # node looks for packages beside the script
        script.write_text(NODE_SCRIPT.read_text())
        return json.loads(start(["node", script.name, *shape], cwd=args.node_modules))

    return Engine(name, measure)


def ours(name: str, args: argparse.Namespace, model: str, ffn: str | None = None) -> Engine:
    """Return pi-bench on a file."""

    def measure(threads: int) -> Run:
        command = [sys.executable, "-m", "powerinfer_toolkit.runtime.bench", "-m", model]
        tests = {"-p": args.prompt, "-n": args.decode, "-t": threads, "-r": 1}
        command += [str(word) for pair in tests.items() for word in pair]
        command += ["--json", "-q", *(["--ffn", ffn] if ffn else [])]
        rows = json.loads(start(command, isa=args.isa))["results"]
        names = {f"pp{args.prompt}": "prompt", f"tg{args.decode}": "decode"}
        return {"isa": rows[0]["isa"]} | {names[row["test"]]: row["tok_s"] for row in rows}

    return Engine(name, measure)


def engines(args: argparse.Namespace) -> list[Engine]:
    """Return what is compared, ours first."""
    found = [ours("ours", args, args.model)]
    if args.sparse:
        found += [ours(f"ours {ffn}", args, args.sparse, ffn) for ffn in args.ffn]
    return [*found, *(peer(name, args) for name in args.peers)]


def measure_all(args: argparse.Namespace, compared: list[Engine]) -> dict[int, Rounds]:
    """Return the runs of every round, by thread count."""
    found: dict[int, Rounds] = {}
    for threads in args.threads:
        found[threads] = {engine.name: [] for engine in compared}
        for number in range(args.rounds):
            turn = number % len(compared)
            for engine in compared[turn:] + compared[:turn]:
                run = engine.measure(threads)
                found[threads][engine.name].append(run)
                speeds = ", ".join(f"{test} {run[test]:.1f}" for test in TESTS if test in run)
                print(
                    f"{threads} threads, round {number}, {engine.name}: {speeds}", file=sys.stderr
                )
    return found


def best_rounds(found: dict[int, Rounds], test: str) -> dict[str, list[float]]:
    """Return every engine's speeds at the thread count where its median is highest."""
    best = {}
    for name in next(iter(found.values())):
        candidates = [[run[test] for run in rounds[name]] for rounds in found.values()]
        best[name] = max(candidates, key=statistics.median)
    return best


def summarise(found: dict[int, Rounds], peers: list[str]) -> list[dict[str, Any]]:
    """Return one row an engine, test and thread count: median, spread, ratios to the peers by round."""
    rows = []
    first = next(iter(found.values()))
    tests = [test for test in TESTS if test in next(iter(first.values()))[0]]
    for test in tests:
        speeds: dict[int | str, dict[str, list[float]]] = {
            threads: {name: [run[test] for run in runs] for name, runs in rounds.items()}
            for threads, rounds in found.items()
        }
        if len(found) > 1:
            speeds[ALL] = best_rounds(found, test)
        for threads, by_engine in speeds.items():
            rows += [
                _row(test, threads, name, values, {peer: by_engine[peer] for peer in peers})
                for name, values in by_engine.items()
            ]
    return rows


def _row(
    test: str, threads: int | str, name: str, values: list[float], peers: dict[str, list[float]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"test": test, "threads": threads, "engine": name}
    row["tok_s"] = statistics.median(values)
    row["spread"] = (max(values) - min(values)) / row["tok_s"]
    for peer_name, peer_values in peers.items():
        ratios = [own / other for own, other in zip(values, peer_values, strict=True)]
        row[f"ratio_{peer_name}"] = [statistics.median(ratios), min(ratios), max(ratios)]
    return row


def print_markdown(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Print the table for benchmarks/RESULTS.md."""
    title = Path(args.model).name + (f", {Path(args.sparse).name}" if args.sparse else "")
    ratios = "".join(f" ratio to {name} |" for name in args.peers)
    print(f"| {title} | threads | engine | tok/s | spread |{ratios}")
    print("|---" * (5 + len(args.peers)) + "|")
    for row in rows:
        length = args.prompt if row["test"] == "prompt" else args.decode
        cells = [f"{row['test']} {length}", row["threads"], row["engine"]]
        cells += [f"{row['tok_s']:.1f}", f"{row['spread']:.0%}"]
        for name in args.peers:
            median, least, largest = row[f"ratio_{name}"]
            cells.append(
                "-" if row["engine"] == name else f"{median:.2f} ({least:.2f}-{largest:.2f})"
            )
        print("| " + " | ".join(map(str, cells)) + " |")


def instruction_sets(found: dict[int, Rounds]) -> dict[str, str]:
    """Return what every engine says that it uses; of llama.cpp what is on."""
    first = next(iter(found.values()))
    return {name: _short(runs[0]["isa"]) for name, runs in first.items()}


def _short(isa: str) -> str:
    on = [part.split("=")[0].split(":")[-1].strip() for part in isa.split("|") if "= 1" in part]
    return " ".join(on) if "=" in isa else isa


def vocabulary(model: str) -> int:
    """Return the number of tokens of a file."""
    from powerinfer_toolkit.runtime.model_file import ModelFile

    with ModelFile(model) as file:
        return file.shape.n_vocab


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this script."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="GGUF file that all engines run")
    parser.add_argument("--sparse", help="ReLU-sparse file that our engine runs besides")
    parser.add_argument(
        "--ffn",
        nargs="+",
        default=["exact", "predicted"],
        choices=("dense", "exact", "predicted"),
        help="its FFN modes (exact predicted)",
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=["xllamacpp"])
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
    """Compare, or (as --worker MODEL THREADS PROMPT DECODE VOCABULARY) be the peer's process."""
    if sys.argv[1:2] == ["--worker"]:
        model, *numbers = sys.argv[2:]
        print(json.dumps(measure_xllamacpp(model, *map(int, numbers))))
        return
    args = build_parser().parse_args()
    args.model = str(Path(args.model).resolve())
    if "node-llama-cpp" in args.peers and args.node_modules is None:
        sys.exit("--peers node-llama-cpp needs --node-modules FOLDER")
    args.n_vocab = vocabulary(args.model)
    found = measure_all(args, engines(args))
    rows = summarise(found, args.peers)
    if args.json:
        record = {"settings": vars(args), "isa": instruction_sets(found), "results": rows}
        print(json.dumps({**record, "rounds": found}, indent=1, default=str))
        return
    for name, isa in instruction_sets(found).items():
        print(f"{name}: {isa}", file=sys.stderr)
    print_markdown(args, rows)


if __name__ == "__main__":
    main()
