"""Models, modes or builds of the library beside each other: every one in a process of its own that stays, in turns.

A round asks each of them once; what disturbs a machine for longer than a round disturbs all alike. Printed are the
best and the median time, and the median of the rounds' ratios to the first one, least and largest in brackets. With
one thread times are processor time. Decoding: the lower quartile of N steps after DEPTH tokens. Prompts: N tokens in
steps of 512. Several tests, with commas between, take turns too, and their times of a round are compared with the
first one's.

    python benchmarks/alternate.py decode:24 7b-dense.gguf 7b.gguf:exact 7b.gguf:predicted
    python benchmarks/alternate.py decode:16:8064 model.gguf@build/old/libpi.so model.gguf@build/dev/libpi.so
    python benchmarks/alternate.py prompt:512,prompt:2048 model.gguf -t 2 -r 7
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np

STEP = 512


class Worker:
    """The process of one model: says the time in ms of every test that it is asked for."""

    def __init__(self, path: str, ffn: str | None, threads: int, context: int) -> None:
        from powerinfer_toolkit.runtime.model import Model

        self.model = Model.load(path, threads=threads, context=context, batch=STEP, ffn=ffn)
        self.engine = self.model.engine
        self.clock = time.process_time_ns if threads == 1 else time.perf_counter_ns
        self.rng = np.random.default_rng(0)

    def run(self, n_tokens: int) -> float:
        """Run one step of random tokens with the last one's logits; return its ms."""
        from powerinfer_toolkit.runtime.engine import Batch

        tokens = self.rng.integers(3, self.engine.n_vocab, n_tokens).astype(np.int32)
        batch = Batch(tokens, want_logits=np.arange(n_tokens) == n_tokens - 1)
        start = self.clock()
        self.engine.run(batch)
        return (self.clock() - start) * 1e-6

    def prompt(self, n_tokens: int) -> float:
        self.engine.kv_truncate(0, 0)
        return sum(self.run(min(STEP, n_tokens - i)) for i in range(0, n_tokens, STEP))

    def decode(self, n_tokens: int, depth: int) -> float:
        if self.engine.kv_length() < depth:
            self.prompt(depth)
        self.engine.kv_truncate(0, depth)
        return sorted(self.run(1) for _ in range(n_tokens))[n_tokens // 4]


@dataclass(frozen=True)
class Test:
    """KIND:N[:DEPTH]"""

    kind: str
    n_tokens: int
    depth: int = 0

    @classmethod
    def parse(cls, text: str) -> Test:
        kind, *numbers = text.split(":")
        if kind not in ("prompt", "decode"):
            raise argparse.ArgumentTypeError(f"{kind} is no test")
        return cls(kind, *map(int, numbers))

    def measure(self, worker: Worker) -> float:
        if self.kind == "prompt":
            return worker.prompt(self.n_tokens)
        return worker.decode(self.n_tokens, self.depth)


def serve(tests: list[Test], path: str, ffn: str, threads: int) -> None:
    """Measure once for every line of the standard input."""
    context = max(test.n_tokens + test.depth for test in tests) + 1
    worker = Worker(path, ffn or None, threads, context)
    for _ in sys.stdin:
        print(*(test.measure(worker) for test in tests), flush=True)


def start(config: str, tests: str, threads: int) -> subprocess.Popen[str]:
    """Start the worker of MODEL[:FFN][@LIBRARY]."""
    model, _, library = config.partition("@")
    path, _, ffn = model.partition(":")
    return subprocess.Popen(
        [sys.executable, __file__, tests, path, "--serve", ffn, "-t", str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ({"PI_LIB": library} if library else {}),
    )


def ask(process: subprocess.Popen[str]) -> list[float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return [float(ms) for ms in process.stdout.readline().split()]


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f}x ({min(ratios):.3f}-{max(ratios):.3f})"


def report(tests: list[str], rounds: list[dict[str, list[float]]]) -> None:
    """Print a line for every test of every configuration."""
    first = next(iter(rounds[0]))
    for i, test in enumerate(tests):
        for config in rounds[0]:
            times = [times[config][i] for times in rounds]
            line = f"best {min(times):.2f} ms, median {statistics.median(times):.2f}"
            line += f"; {spread([times[first][i] / times[config][i] for times in rounds])}"
            if i > 0:
                growth = [times[config][i] / times[config][0] for times in rounds]
                line += f"; time {spread(growth)} that of {tests[0]}"
            print(f"{test} {config}: {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("tests", help="prompt:N or decode:N[:DEPTH], or some with commas between")
    parser.add_argument("configs", nargs="+", metavar="MODEL[:FFN][@LIBRARY]")
    parser.add_argument("-t", "--threads", type=int, default=1)
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.tests.split(",")
    tests = [Test.parse(name) for name in names]
    if options.serve is not None:
        return serve(tests, options.configs[0], options.serve, options.threads)
    processes = {
        config: start(config, options.tests, options.threads) for config in options.configs
    }
    for process in processes.values():
        ask(process)  # to warm up
    rounds = [{c: ask(process) for c, process in processes.items()} for _ in range(options.rounds)]
    for process in processes.values():
        process.communicate()
    return report(names, rounds)


if __name__ == "__main__":
    main()
