"""What counting costs: tokens/s of pi-profile's pass against the plain forward pass, one after the other.

usage: profile_throughput.py MODEL [N_BLOCKS [REPETITIONS]]      blocks of 1024 random tokens, 16 at a time
Prints one JSON object; ratio is the median of the repetitions' ratios.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from accelerate import Accelerator

from powerinfer_toolkit.profile_activations.device_tally import DeviceTally
from powerinfer_toolkit.training.checkpoint import SparseModel, load_sparse_model

LENGTH, BATCH = 1024, 16


def seconds(run: Callable[[torch.Tensor], None], batches: list[torch.Tensor]) -> float:
    """Return the time of all batches, the device's work included."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    for tokens in batches:
        run(tokens)
    wait()
    return time.perf_counter() - start


@torch.inference_mode()
def plain(model: SparseModel, tokens: torch.Tensor) -> None:
    model.hidden_states(tokens.to(model.device))


def main(source: str, n_blocks: int, repetitions: int) -> None:
    model = load_sparse_model(source, device=Accelerator().device)
    generator = torch.Generator().manual_seed(0)
    n_vocab = model.model.config.vocab_size
    blocks = torch.randint(n_vocab, (n_blocks, LENGTH), generator=generator)
    batches = list(blocks.split(BATCH))
    tally = DeviceTally(model)
    counted = torch.ones(BATCH, LENGTH, dtype=torch.bool)

    def count(tokens: torch.Tensor) -> None:
        tally.observe(tokens, counted[: len(tokens)])

    def forward(tokens: torch.Tensor) -> None:
        plain(model, tokens)

    for run in (forward, count):
        seconds(run, batches[:1])
    pairs = [(seconds(forward, batches), seconds(count, batches)) for _ in range(repetitions)]
    n_tokens = n_blocks * LENGTH
    record = {
        "device": str(model.device),
        "tokens": n_tokens,
        "plain_tokens_per_second": [round(n_tokens / a) for a, _ in pairs],
        "profile_tokens_per_second": [round(n_tokens / b) for _, b in pairs],
        "ratio": statistics.median(a / b for a, b in pairs),
    }
    if torch.cuda.is_available():
        record["peak_bytes"] = torch.cuda.max_memory_allocated()
    print(json.dumps(record))


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[2:]]
    main(sys.argv[1], *(numbers + [64, 3][len(numbers) :]))
