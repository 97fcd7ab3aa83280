"""pi-run --doctor: what is here, what is missing and why."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable

from powerinfer_toolkit import __version__
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import Key, TensorType
from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.device import probe_device
from powerinfer_toolkit.runtime.plan.machine import probe
from powerinfer_toolkit.runtime.plan.planner import available_modes, choose_ffn_mode, format_bytes


def describe_build() -> str:
    """Return ABI and best instruction set, or why the library cannot say."""
    try:
        return f"ABI {native_lib.ABI_VERSION}, kernels {native_lib.select_isa()}"
    except PiError as failure:
        return f"ABI {native_lib.ABI_VERSION}, no native library: {failure.message}"


def examine(model: str | None) -> None:
    """Print one line a topic to stdout; PiError at the end when anything is wrong."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("toolkit", lambda: f"{__version__}, Python {platform.python_version()}"),
        ("library", _library),
        ("kernels", _kernels),
        ("machine", _machine),
        ("GPU", _gpu),
    ]
    if model:
        checks += [
            ("model", lambda: _model(model)),
            ("predictors", lambda: _predictors(model)),
            ("tokenizer", lambda: _tokenizer(model)),
        ]
    n_failed = 0
    for topic, check in checks:
        try:
            text = check()
        except PiError as failure:
            n_failed += 1
            text = f"FAILED: {failure.message}" + (f" ({failure.hint})" if failure.hint else "")
        print(f"{topic:<12}{text}")
    if n_failed:
        raise PiError(
            f"{n_failed} of {len(checks)} checks failed", hint="see the lines marked FAILED"
        )


def _library() -> str:
    native_lib.load()
    source = "PI_LIB" if os.environ.get("PI_LIB") else "installed"
    return f"{native_lib.library_path()} ({source}), ABI {native_lib.ABI_VERSION}"


def _kernels() -> str:
    names = [
        name if usable else f"{name} (not on this processor)"
        for name, usable in native_lib.instruction_sets()
    ]
    chosen = "PI_ISA" if os.environ.get("PI_ISA") else "the best one"
    return f"{', '.join(names)}; used: {native_lib.select_isa()}, {chosen}"


def _machine() -> str:
    machine = probe()
    return (
        f"{platform.machine()}, {machine.n_cores} cores and {machine.n_cpus} processors usable, "
        f"{format_bytes(machine.available_bytes)} of memory available"
    )


def _gpu() -> str:
    library = native_lib.load()
    if library.pi_gpu_count() == 0:
        return f"none: {library.pi_last_error().decode('utf-8', 'replace')}"
    device = probe_device()
    major, minor = divmod(device.capability, 10)
    return (
        f"{device.name}, compute capability {major}.{minor}, {device.n_processors} processors, "
        f"{format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free beside a context of "
        f"{format_bytes(device.context_bytes)}; used with --vram-budget"
    )


def _model(path: str) -> str:
    with ModelFile(path) as file:
        shape = file.shape
        kinds = Counter(tensor.type for tensor in file.tensors())
        types = ", ".join(f"{n} {TensorType(kind).name}" for kind, n in kinds.most_common())
        modes = ", ".join(mode.name.lower() for mode in available_modes(shape))
        synthetic = "random weights, " if file.metadata(Key.SYNTHETIC) else ""
        return (
            f"{synthetic}{file.metadata('general.architecture')}, {shape.activation}, {shape.n_layers} layers, "
            f"{format_bytes(shape.weight_bytes)} ({types}); "
            f"ffn {modes}, default {choose_ffn_mode(shape, None).name.lower()}"
        )


def _predictors(path: str) -> str:
    """Say what the file records of its predictors."""
    with ModelFile(path) as file:
        if not file.shape.has_predictors:
            return "none"
        if not file.shape.predictable:
            return "all-zero ones: every neuron is computed"
        measured = {
            name: file.metadata(key)
            for name, key in (
                ("recall", Key.PREDICTOR_RECALL),
                ("density", Key.PREDICTOR_DENSITY),
                ("perplexity", Key.PREDICTOR_PERPLEXITY_LOSS),
            )
        }
        exact = sum(file.metadata(Key.PREDICTOR_EXACT_LAYERS) or [])
        parts = [f"target {file.metadata(Key.PREDICTOR_TARGET) or 'unknown'}"]
        for name, value in measured.items():
            sign = "+" if name == "perplexity" else ""
            parts.append(f"{name} " + ("not measured" if value is None else f"{value:{sign}.2%}"))
        return ", ".join(parts) + (f", {exact} layers stay exact" if exact else "")


def _tokenizer(path: str) -> str:
    from powerinfer_toolkit.runtime.tokenizer import Tokenizer

    with ModelFile(path) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata, file.shape.n_vocab)
        template = "a" if tokenizer.chat_template else "no"
        return f"{tokenizer.n_vocab} tokens, {template} chat template"
