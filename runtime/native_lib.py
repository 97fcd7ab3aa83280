"""ctypes binding of pi.h: one prototype table, one loader, one status check; native_structs.py has the structs.

tests/architecture/test_abi.py holds this file against the header, field by field.
"""

from __future__ import annotations

import ctypes as ct
import os
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import DoesNotFit, ExitCode, PiError, UsageError

# One import of what this module hands on.
# isort: off
from powerinfer_toolkit.runtime.native_structs import (
    STRUCTS as STRUCTS,
    AbortFn as AbortFn,
    Batch as Batch,
    BytePtr as BytePtr,
    FloatPtr as FloatPtr,
    GpuDevice as GpuDevice,
    Handle as Handle,
    HandlePtr as HandlePtr,
    Int32Ptr as Int32Ptr,
    LayerTimes as LayerTimes,
    LogFn as LogFn,
    ModelConfig as ModelConfig,
    Plan as Plan,
    SamplerParams as SamplerParams,
    Stats as Stats,
    StringPtr as StringPtr,
    TensorInfo as TensorInfo,
    Tier as Tier,
    UInt32Ptr as UInt32Ptr,
    UInt64Ptr as UInt64Ptr,
    Unit as Unit,
    Value as Value,
)

# isort: on

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

P = TypeVar("P", bound="ct._Pointer[Any]")

ABI_VERSION = 1

_STATUS = ct.c_int32
_U32, _I32, _U64, _I64, _F32 = ct.c_uint32, ct.c_int32, ct.c_uint64, ct.c_int64, ct.c_float
_TEXT, _DATA = ct.c_char_p, ct.c_void_p
_ROWS = ct.POINTER(FloatPtr)

# Header name -> (restype, argtypes). Everything that returns pi_status raises PiError when it is not 0.
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "pi_abi_version": (_U32, []),
    "pi_last_error": (_TEXT, []),
    "pi_last_hint": (_TEXT, []),
    "pi_isa_count": (_U32, []),
    "pi_isa": (_STATUS, [_U32, StringPtr, UInt32Ptr]),
    "pi_isa_select": (_STATUS, [_TEXT, StringPtr]),
    "pi_gpu_count": (_U32, []),
    "pi_gpu_probe": (_STATUS, [_U32, ct.POINTER(GpuDevice)]),
    "pi_gpu_probe_read": (_STATUS, [_U32, _U32, _U64, _F32, UInt64Ptr]),
    "pi_type_layout": (_STATUS, [_U32, UInt32Ptr, UInt32Ptr]),
    "pi_probe_read": (_STATUS, [_U32, _U64, _F32, UInt64Ptr]),
    "pi_set_log": (None, [LogFn, _DATA]),
    "pi_model_open": (_STATUS, [_TEXT, HandlePtr]),
    "pi_model_close": (None, [Handle]),
    "pi_model_get_config": (_STATUS, [Handle, ct.POINTER(ModelConfig)]),
    "pi_model_key_count": (_U64, [Handle]),
    "pi_model_key": (_STATUS, [Handle, _U64, StringPtr, ct.POINTER(Value)]),
    "pi_model_find_key": (_STATUS, [Handle, _TEXT, ct.POINTER(Value)]),
    "pi_model_tensor_count": (_U64, [Handle]),
    "pi_model_tensor": (_STATUS, [Handle, _U64, StringPtr, ct.POINTER(TensorInfo)]),
    "pi_engine_create": (_STATUS, [Handle, ct.POINTER(Plan), HandlePtr]),
    "pi_engine_free": (None, [Handle]),
    "pi_engine_set_abort": (_STATUS, [Handle, AbortFn, _DATA]),
    "pi_engine_submit": (_STATUS, [Handle, ct.POINTER(Batch), UInt64Ptr]),
    "pi_engine_wait": (_STATUS, [Handle, _U64, _U32, UInt32Ptr]),
    "pi_engine_abort": (_STATUS, [Handle]),
    "pi_engine_logits": (_STATUS, [Handle, UInt32Ptr, _ROWS]),
    "pi_engine_top": (
        _STATUS,
        [Handle, _U32, UInt32Ptr, ct.POINTER(Int32Ptr), _ROWS, FloatPtr],
    ),
    "pi_engine_logprobs": (_STATUS, [Handle, UInt32Ptr, _ROWS]),
    "pi_engine_set_recording": (_STATUS, [Handle, ct.c_uint32]),
    "pi_engine_fired": (
        _STATUS,
        [Handle, ct.POINTER(ct.c_uint32), ct.POINTER(ct.c_uint32), ct.POINTER(UInt64Ptr)],
    ),
    "pi_engine_set_timing": (_STATUS, [Handle, _U32]),
    "pi_engine_layer_times": (_STATUS, [Handle, ct.POINTER(LayerTimes)]),
    "pi_engine_stats": (_STATUS, [Handle, ct.POINTER(Stats)]),
    "pi_engine_reset_stats": (_STATUS, [Handle]),
    "pi_kv_length": (_STATUS, [Handle, _I32, UInt32Ptr]),
    "pi_kv_truncate": (_STATUS, [Handle, _I32, _U32]),
    "pi_kv_copy": (_STATUS, [Handle, _I32, _I32]),
    "pi_kv_save": (_STATUS, [Handle, _I32, _DATA, UInt64Ptr]),
    "pi_kv_load": (_STATUS, [Handle, _I32, _DATA, _U64]),
    "pi_sampler_create": (_STATUS, [ct.POINTER(SamplerParams), HandlePtr]),
    "pi_sampler_free": (None, [Handle]),
    "pi_sampler_accept": (_STATUS, [Handle, _I32]),
    "pi_sampler_top": (_STATUS, [Handle, UInt32Ptr]),
    "pi_sampler_sample": (_STATUS, [Handle, Handle, _U32, Int32Ptr, FloatPtr]),
    "pi_sampler_sample_logits": (_STATUS, [Handle, FloatPtr, _U32, Int32Ptr, FloatPtr]),
    "pi_kernel_dequantize": (_STATUS, [_TEXT, _U32, _DATA, _I64, _I64, FloatPtr]),
    "pi_kernel_dot_rows": (
        _STATUS,
        [_TEXT, _U32, _U32, _DATA, Int32Ptr, _I64, _I64, FloatPtr, FloatPtr],
    ),
    "pi_kernel_multiply_rows": (
        _STATUS,
        [_TEXT, _U32, _DATA, _I64, _I64, FloatPtr, _I64, FloatPtr],
    ),
    "pi_kernel_axpy_rows": (
        _STATUS,
        [_TEXT, _U32, _DATA, Int32Ptr, _I64, _I64, FloatPtr, _I64, _I64, FloatPtr],
    ),
    "pi_kernel_rms_norm": (_STATUS, [_TEXT, FloatPtr, FloatPtr, _I64, _F32, FloatPtr]),
    "pi_kernel_gated": (_STATUS, [_TEXT, _U32, _F32, FloatPtr, FloatPtr, _I64, FloatPtr]),
    "pi_kernel_gemm": (_STATUS, [_TEXT, FloatPtr, _U32, _I64, _I64, FloatPtr, _I64, FloatPtr]),
    "pi_kernel_attention": (
        _STATUS,
        [
            *[_TEXT, _U32, FloatPtr, _I64, FloatPtr, FloatPtr, _I64, _I64, _F32],
            *[FloatPtr, FloatPtr],
        ],
    ),
}


def library_path() -> Path:
    """Return where the native library is looked for: $PI_LIB, else inside the installed package."""
    override = os.environ.get("PI_LIB")
    if override:
        return Path(override)
    name = {"win32": "pi.dll", "darwin": "libpi.dylib"}.get(sys.platform, "libpi.so")
    return Path(str(files("powerinfer_toolkit.runtime").joinpath("lib", name)))


@cache
def load() -> ct.CDLL:
    """Load the library once and give every function its types.

    Raises PiError when it is missing, does not load or speaks another ABI.
    """
    path = library_path()
    if not path.is_file():
        raise PiError(
            f"the native library was not found; looked at {path}",
            hint="build it: pip install . (needs a C++20 compiler), or set PI_LIB to a libpi file",
        )
    try:
        library = ct.CDLL(str(path))
    except OSError as failure:
        hint = "it must be a libpi built for this system: pip install --force-reinstall ."
        raise PiError(f"cannot load {path}: {failure}", hint=hint) from failure
    _declare(library, path)
    library.pi_set_log(_log, None)
    return library


def _declare(library: ct.CDLL, path: Path) -> None:
    reinstall = "rebuild and reinstall: pip install --force-reinstall ."
    for name, (restype, argtypes) in PROTOTYPES.items():
        try:
            function = getattr(library, name)
        except AttributeError as failure:
            raise PiError(f"{path} has no function {name}", hint=reinstall) from failure
        function.restype, function.argtypes = restype, argtypes
        if restype is _STATUS:
            function.errcheck = _check
    found = library.pi_abi_version()
    if found != ABI_VERSION:
        raise PiError(f"{path} speaks ABI {found}, this package ABI {ABI_VERSION}", hint=reinstall)


def _check(status: int, _function: object, _arguments: tuple[object, ...]) -> int:
    """Turn a status into the exception for it; runs on the thread that called, as the message needs."""
    if status == ExitCode.OK:
        return status
    library = load()
    message = library.pi_last_error().decode("utf-8", "replace") or f"native status {status}"
    hint = library.pi_last_hint().decode("utf-8", "replace")
    if status == ExitCode.USAGE:
        raise UsageError(message, hint=hint)
    if status == ExitCode.DOES_NOT_FIT:
        raise DoesNotFit(message, hint=hint)
    known = status in set(ExitCode)
    raise PiError(message, hint=hint, exit_code=ExitCode(status) if known else ExitCode.FAILURE)


def _forward_log(level: int, message: bytes, _user: object) -> None:
    text = message.decode("utf-8", "replace")
    console.warning(text) if level <= 1 else console.detail(text)


_log = LogFn(_forward_log)


def pointer(array: npt.NDArray[np.generic], kind: type[P]) -> P:
    """Return a typed pointer to a C-contiguous array, which it keeps; `kind` is FloatPtr, Int32Ptr, ..."""
    if not array.flags.c_contiguous or array.itemsize != ct.sizeof(kind._type_):
        raise TypeError(f"a contiguous array of {kind._type_.__name__} is needed")
    return array.ctypes.data_as(kind)


def instruction_sets() -> list[tuple[str, bool]]:
    """Return (name, usable on this processor) of every compiled kernel table, slowest first."""
    library = load()
    found = []
    for index in range(library.pi_isa_count()):
        name, usable = ct.c_char_p(), ct.c_uint32()
        library.pi_isa(index, ct.byref(name), ct.byref(usable))
        found.append(((name.value or b"").decode(), bool(usable.value)))
    return found


def select_isa(requested: str | None = None) -> str:
    """Return the instruction set an engine takes: `requested`, else $PI_ISA, else the best usable."""
    name = ct.c_char_p()
    load().pi_isa_select(requested.encode() if requested else None, ct.byref(name))
    return (name.value or b"").decode()
