"""What a finished model is worth: verified against its checkpoint, and its speed beside the dense model's."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from powerinfer_toolkit import console
from powerinfer_toolkit.artifact import new_file
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.recipes.results import DECODED_TOKENS, REPETITIONS
from powerinfer_toolkit.recipes.stages import Run
from powerinfer_toolkit.recipes.verify import verify
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.sampling import Sampling

PROMPT = "The"


def measure(run: Run) -> None:
    """Write the run's report: both files against their checkpoints, speeds by mode, the machine.

    Raises PiError where a file does not compute what its checkpoint does; no report is then written.
    """
    settings = run.settings["verify"]
    predictors = None if run.predictors is None else str(run.predictors)
    sparse = dataclasses.replace(settings, predictors=predictors)
    report: dict[str, Any] = {
        "model": _verified(str(run.checkpoint), run.model, sparse),
        "dense": _verified(run.source, run.dense, settings),
    }
    modes = [("dense", run.dense), ("exact", run.model)]
    if predictors is not None:
        modes.append(("predicted", run.model))
    console.info("measuring decode speed")
    report["decode_tok_s"] = {
        mode: decode_speed(path, mode, settings.threads) for mode, path in modes
    }
    report["machine"] = _machine(run.model, settings.threads)
    run.report.parent.mkdir(exist_ok=True)
    with new_file(run.report, force=True) as temporary:
        temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _verified(checkpoint: str, file: Path, settings: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return verify()'s report. Raises PiError where the file fails it."""
    console.info(f"verifying {file.name}")
    report: dict[str, Any] = verify(checkpoint, file, settings)
    if not report["passed"]:
        raise PiError(
            f"{file} does not compute what its checkpoint does",
            hint=f"pi-verify {checkpoint} {file} says by how much",
        )
    return report


def decode_speed(path: Path, mode: str, threads: int | None) -> float:
    """Return the median tokens per second of greedy decoding in an FFN mode, after one warm-up."""
    speeds = []
    with Model.load(path, ffn=mode, threads=threads) as model:
        prompt = model.tokenizer.encode(PROMPT)
        for _ in range(1 + REPETITIONS):
            text = model.generate(
                prompt,
                n_predict=DECODED_TOKENS,
                sampling=Sampling(temperature=0),
                ignore_eos=True,
            )
            n_decoded = len(list(text)) - 1  # the first one belongs to the prompt
            speeds.append(n_decoded / text.decode_seconds)
    return statistics.median(speeds[1:])


def _machine(path: Path, threads: int | None) -> dict[str, Any]:
    with Model.load(path, threads=threads) as model:
        return {"threads": model.plan.n_threads, "kernels": model.stats().isa}
