"""What pi-verify prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PERPLEXITIES = {
    "checkpoint": "checkpoint in transformers",
    "predicted_checkpoint": "  with its predictors' masks",
    "file_weights": "file's weights in transformers",
    "predicted_torch": "  with the file's predictors' masks",
    "dense": "file, dense",
    "exact": "file, exact",
    "predicted": "file, predicted",
}
_DISTANCES = {
    "checkpoint": "from the checkpoint",
    "file_weights": "from the file's weights in transformers",
    "steps": "  the same, in single steps",
}


def to_tables(report: Mapping[str, Any]) -> str:
    """Return the report of verify() as text."""
    return "\n\n".join(
        "\n".join(lines)
        for lines in (
            _head(report),
            _perplexities(report["perplexity"]),
            _logits(report["logits"]),
            _checks(report["checks"]),
        )
    )


def _head(report: Mapping[str, Any]) -> list[str]:
    known = {True: "recorded as its source", False: "NOT its source", None: "source not recorded"}
    matches = known[report["source"]["matches"]]
    return [
        f"{report['file']} against {report['checkpoint']} ({matches})",
        f"types {', '.join(report['types'])}; activations {report['activation_type']}, "
        f"KV cache {report['kv_type']}; {report['tokens']} tokens in {report['windows']} windows",
    ]


def _perplexities(values: Mapping[str, float]) -> list[str]:
    found = [name for name in _PERPLEXITIES if name in values]
    return [
        "perplexity",
        *(f"  {_PERPLEXITIES[name]:<40} {values[name]:>12.4f}" for name in found),
    ]


def _logits(distances: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = [f"{'logits':<42} {'relative L2':>12} {'KL, nats':>12} {'top 1':>8}"]
    for name, label in _DISTANCES.items():
        found = distances[name]
        lines.append(
            f"  {label:<40} {found['relative_l2']:>12.2e} {found['kl']:>12.2e} "
            f"{found['top1_agreement']:>8.2%}"
        )
    return lines


def _checks(checks: list[Mapping[str, Any]]) -> list[str]:
    width = max(len(check["name"]) for check in checks)
    lines = [f"{'check':<{width + 2}} {'found':>10} {'at most':>10}"]
    for check in checks:
        verdict = "ok" if check["passed"] else "NO"
        lines.append(
            f"  {check['name']:<{width}} {check['value']:>10.3g} {check['limit']:>10.3g}  {verdict}"
        )
    return lines
