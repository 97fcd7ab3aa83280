"""The model card beside the file: README.md as the Hugging Face hub shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from powerinfer_toolkit import __version__
from powerinfer_toolkit.fingerprint import weights_sha256
from powerinfer_toolkit.hub import locate
from powerinfer_toolkit.recipes.results import DECODED_TOKENS, REPETITIONS, Results
from powerinfer_toolkit.recipes.stages import RECIPE, Run
from powerinfer_toolkit.settings import dump_yaml

SEEDED = ("synthetic", "relufy", "profile", "train_predictor")


def to_text(run: Run, results: Results) -> str:
    """Return the card: front matter, table, how to run it, and what it was made from."""
    best = max(results.rows[1:], key=lambda row: row.decode_tok_s)
    return f"""---
{dump_yaml(_front_matter(run))}---

# {run.recipe.file_stem}

{run.recipe.description or "A ReLU-sparse model"}.

A PowerInfer-GGUF file, made from {_source(run)} with the recipe `{run.recipe.name}` of powerinfer-toolkit {__version__}.

{results.to_markdown()}

- perplexity: through the runtime, {results.report["model"]["tokens"]:,} tokens of held-out text in windows of at most {_window(run)}; the
  sparse checkpoint in transformers: {_checkpoint(results)}
- dense: the source model in the same types; exact: up and down rows where the gate is open, which loses nothing;
  predicted: only what the predictors let through
- decode tok/s: greedy, median of {REPETITIONS} times {DECODED_TOKENS} tokens, {_machine(results)}
- zero share: of the FFN activations of the sparse checkpoint; FFN bytes: read at a token, relative to dense

## Running it

```sh
pi-run -m {run.model.name} --ffn {best.mode} -p "Once upon a time"
```

## How it was made

`{RECIPE}` beside this file holds every setting; `pi-recipe run {RECIPE} --output_dir OUT` makes it again.

| | |
|---|---|
{_table(_provenance(run, results))}

## Licence

{_licence(run)}
"""


def _front_matter(run: Run) -> dict[str, Any]:
    matter: dict[str, Any] = {"base_model": _base_model(run)}
    if run.recipe.license:
        matter["license"] = run.recipe.license
    datasets = [source.id for source in run.settings["relufy"].dataset_mixture if source.id]
    if datasets:
        matter["datasets"] = datasets
    tags = ["PowerInfer", "powerinfer-toolkit", "gguf", "relu", "activation-sparsity"]
    return matter | {
        "library_name": "powerinfer-toolkit",
        "pipeline_tag": "text-generation",
        "tags": tags,
    }


def _source(run: Run) -> str:
    return f"`{run.source}`" if _is_of_hub(run) else f"the local model `{_base_model(run)}`"


def _is_of_hub(run: Run) -> bool:
    return not Path(run.source).is_dir()


def _base_model(run: Run) -> str:
    """Return the hub's name of the source, or that of its directory."""
    return run.source.partition("@")[0] if _is_of_hub(run) else Path(run.source).resolve().name


def _window(run: Run) -> int:
    length: int = run.settings["verify"].max_length
    return length


def _checkpoint(results: Results) -> str:
    return f"{results.report['model']['perplexity']['checkpoint']:.2f}"


def _machine(results: Results) -> str:
    threads = results.machine["threads"]
    return f"{threads} thread{'s' * (threads != 1)}, {results.machine['kernels']} kernels"


def _provenance(run: Run, results: Results) -> dict[str, str]:
    """Return what the model was made from, by name."""
    relufy, source = run.settings["relufy"], locate(run.source)
    revision = source.revision or f"weights {weights_sha256(source.path)[:16]}"
    found = {
        "source": f"{source.name}, {revision}",
        "variant": f"{relufy.variant}, aimed at {relufy.sparsity_target or 0:.1%} zeros",
        "training text": ", ".join(_names(relufy.dataset_mixture)),
        "held-out text": ", ".join(_names(relufy.eval_mixture))
        or f"{relufy.held_out_share:.1%} of the documents",
        "seeds": ", ".join(f"{s} {run.settings[s].seed}" for s in SEEDED if s in run.settings),
        "types": run.settings["convert"].outtype,
    }
    if "train_predictor" in run.settings:
        predictor = run.settings["train_predictor"]
        ranks = ", ".join(map(str, predictor.predictor_rank))
        allowed = predictor.target_perplexity_loss[0]
        found["predictors"] = f"rank {ranks}, calibrated to {allowed:+.1%} perplexity"
    distance = results.report["model"]["logits"]["checkpoint"]
    found["against the sparse checkpoint"] = (
        f"logits {distance['relative_l2']:.2e} apart (relative L2), KL {distance['kl']:.2e} nats"
    )
    return found


def _names(sources: list[Any]) -> list[str]:
    return [source.id or Path(source.path).name for source in sources]


def _table(rows: dict[str, str]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def _licence(run: Run) -> str:
    if run.recipe.license:
        return f"That of the source model: {run.recipe.license}."
    return "That of the source model, which the recipe does not name."
