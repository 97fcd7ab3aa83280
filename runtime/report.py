"""What a run says of itself afterwards: timings and the JSON record."""

from __future__ import annotations

import hashlib
import resource
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from powerinfer_toolkit.runtime.engine import Stats
from powerinfer_toolkit.runtime.generate import Generation
from powerinfer_toolkit.runtime.layer_report import times_record
from powerinfer_toolkit.runtime.model import Model
from powerinfer_toolkit.runtime.plan.plan import Plan
from powerinfer_toolkit.runtime.plan.planner import format_bytes
from powerinfer_toolkit.runtime.plan_report import name


def timing_line(generation: Generation, stats: Stats, ffn_mode: str) -> str:
    """Return speeds, the share of active neurons and a hash of the generated tokens, in one line."""
    n_decoded = _n_decoded(generation)
    return (
        f"prompt {len(generation.prompt)} tokens, {_speed(len(generation.prompt), generation.prompt_seconds)}"
        f" | decode {n_decoded} tokens, {_speed(n_decoded, generation.decode_seconds)}"
        f" | ffn {ffn_mode}, {stats.active_share:.1%} active"
        f" | tokens {token_hash(generation.token_ids)}"
    )


def _n_decoded(generation: Generation) -> int:
    return max(0, len(generation.token_ids) - 1)  # the first one comes out of the prompt's step


def device_line(stats: Stats, plan: Plan) -> str:
    """Return what a run took of the GPU."""
    return (
        f"{stats.device}: {format_bytes(stats.device_bytes)} of {format_bytes(plan.vram_budget_bytes)} taken, the "
        f"context's {format_bytes(stats.device_context_bytes)} included; {stats.device_launches} launches, "
        f"{stats.device_graph_launches} of graphs, for {stats.n_tokens} tokens"
    )


def token_hash(token_ids: Sequence[int]) -> str:
    """Return 8 hexadecimal digits that stand for a sequence of tokens."""
    data = struct.pack(f"<{len(token_ids)}i", *token_ids)
    return hashlib.sha256(data).hexdigest()[:8]


def generation_record(
    model: Model, generation: Generation, text: str, load_seconds: float
) -> dict[str, Any]:
    """Return what pi-run --json prints of a generation."""
    stats = model.stats()
    return {
        "text": text,
        "token_ids": generation.token_ids,
        "prompt_tokens": len(generation.prompt),
        "decode_tokens": _n_decoded(generation),
        "prompt_seconds": generation.prompt_seconds,
        "decode_seconds": generation.decode_seconds,
        "ffn_mode": name(model.plan.ffn_mode),
        "active_share": stats.active_share,
        "load_seconds": load_seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "device": stats.device,
        "device_bytes": stats.device_bytes,
        "vram_budget_bytes": model.plan.vram_budget_bytes,
        "layers": times_record(model),
    }


def peak_rss_bytes() -> int:
    """Return the largest resident size of this process so far."""
    # Linux's getrusage also counts what the parent held when it started this process.
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def reset_peak_rss() -> None:
    """Begin to count the largest resident size anew, where the system can (Linux)."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as switch:
        switch.write("5")


def _speed(n_tokens: int, seconds: float) -> str:
    return f"{n_tokens / seconds:.1f} tok/s" if n_tokens and seconds > 0 else "- tok/s"
