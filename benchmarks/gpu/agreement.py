"""Whether a model says the same on the CPU, on the GPU and split between them: logits, perplexity, greedy text.

    PYTHONPATH=src PI_LIB=... python benchmarks/gpu/agreement.py FILE ... --text TEXT --budgets 0.7,0.9,-1

The reference is the CPU with float32 activations and the same float16 KV cache. A row a file, mode and budget (GiB; -1: all that is free):

- logits of the text's first window, relative L2, as one prompt and as its last tokens one by one. Large steps round
  activations and weights to float16, small ones vectors to 16 bits, hand-overs an element to 12 bits or more, each of
  which is some 1e-4 a layer of independent errors: LOGITS is ten times their sum over 30 layers, sqrt(30) * 2e-4.
- perplexity over all windows, within 0.3%.
- greedy text after the beginnings of the windows: equal up to the first token whose best two logits lie closer than
  what LOGITS allows them to move: two errors of six standard deviations each.

In predicted mode a logit of a predictor beside its threshold may fall on either side, which moves logits further: they are
shown there, and perplexity and text are what counts. Exit code 1 where a limit is passed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from powerinfer_toolkit.errors import DoesNotFit
from powerinfer_toolkit.runtime.engine import Batch
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.perplexity import cut_windows, measure
from powerinfer_toolkit.runtime.sampling import Sampling

LOGITS = 1e-2
PERPLEXITY = 3e-3
N_SINGLE, N_GREEDY, N_BEGINNING = 8, 48, 32

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Said:
    """What a model says: logits [n, n_vocab] of a prompt, of tokens one by one after it; perplexity; texts."""

    prompt: Floats
    singles: Floats
    perplexity: float
    texts: list[list[int]]


def say(model: Model, windows: list[list[int]]) -> Said:
    """Ask a model everything."""
    first = windows[0]
    prompt = model.logits(first[:-N_SINGLE])
    singles = []
    for token in first[-N_SINGLE:]:
        model.engine.run(Batch([token], want_logits=True))
        singles.append(model.engine.logits()[0])
    value = measure(model, windows).value
    limits = {"n_predict": N_GREEDY, "sampling": Sampling(temperature=0), "ignore_eos": True}
    texts = [[t.id for t in model.generate(w[:N_BEGINNING], **limits)] for w in windows]
    return Said(prompt, np.array(singles), value, texts)


def distance(got: Floats, want: Floats) -> float:
    """Relative L2."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def different_text(cpu: Model, windows: list[list[int]], got: Said, want: Said) -> tuple[int, int]:
    """Texts that part at all, and those that part where the CPU's best two logits are not close."""
    parted = wrong = 0
    for window, text, reference in zip(windows, got.texts, want.texts, strict=True):
        at = next((i for i, (a, b) in enumerate(zip(text, reference, strict=True)) if a != b), None)
        if at is None:
            continue
        parted += 1
        row = cpu.logits([*window[:N_BEGINNING], *reference[:at]])[-1]
        second, best = np.sort(row)[-2:]
        wrong += int(best - second > 12 * LOGITS * np.sqrt(np.mean(np.square(row))))
    return parted, wrong


def compare(path: str, ffn: str, budgets: list[float], text: str, chunks: int) -> int:
    """Print the rows of one file and mode; return how many limits were passed."""
    options = {"context": 512, "ffn": ffn, "activation_type": "f32", "kv_type": "f16"}
    failures = 0
    with Model.load(path, **options) as cpu:
        windows = cut_windows(cpu, text, 512, chunks)
        want = say(cpu, windows)
        for budget in budgets:
            size = -1 if budget < 0 else int(budget * 2**30)
            try:
                with Model.load(path, **options, vram_budget_bytes=size) as model:
                    got, taken = say(model, windows), model.stats().device_bytes
            except DoesNotFit as refusal:
                print(f"| {Path(path).name} | {ffn} | {budget:g} | {refusal} |")
                continue
            moved = [distance(got.prompt, want.prompt), distance(got.singles, want.singles)]
            ratio = got.perplexity / want.perplexity - 1
            parted, wrong = different_text(cpu, windows, got, want)
            failures += int(abs(ratio) > PERPLEXITY) + wrong
            failures += int(ffn != "predicted" and max(moved) > LOGITS)
            print(
                f"| {Path(path).name} | {ffn} | {budget:g} | {taken >> 20} MiB | {moved[0]:.1e} / {moved[1]:.1e} | "
                f"{got.perplexity:.4f} ({ratio:+.3%}) | {len(windows) - parted} of {len(windows)} equal, {wrong} wrong |",
                flush=True,
            )
    return failures


def main() -> int:
    """Compare; print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--ffn", default="exact,predicted", help="with commas")
    parser.add_argument("--budgets", default="-1", help="GiB, with commas")
    parser.add_argument("--chunks", type=int, default=8, help="windows of 512 tokens")
    args = parser.parse_args()
    budgets = [float(text) for text in args.budgets.split(",")]
    print("| file | ffn | budget | device | logits, prompt / singles | perplexity | greedy texts |")
    print("|---|---|---|---|---|---|---|")
    text, failures = args.text.read_text(), 0
    for path in args.models:
        for ffn in args.ffn.split(","):
            failures += compare(path, ffn, budgets, text, args.chunks)
    print(f"limits passed: {failures}", file=sys.stderr)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
