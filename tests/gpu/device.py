"""pi_gpu.h on numpy arrays: the device library's own interface, as its tests use it."""

from __future__ import annotations

import ctypes as ct
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ABI = 7
U32, I32, U64, F32, Ptr = ct.c_uint32, ct.c_int32, ct.c_uint64, ct.c_float, ct.c_void_p

# PI_KT_*, in the order of kernels.h: name -> GGUF type id
TYPES = {
    "F32": 0,
    "F16": 1,
    "BF16": 30,
    "Q8_0": 8,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "MXFP4": 39,
    "NVFP4": 40,
}
KERNEL_TYPES = {name: index for index, name in enumerate(TYPES)}


class Info(ct.Structure):
    _fields_ = (
        ("name", ct.c_char * 128),
        ("capability", I32),
        ("n_processors", I32),
        ("total_bytes", U64),
        ("free_bytes", U64),
        ("context_bytes", U64),
        ("mapped_bytes", U64),
        ("budget_bytes", U64),
        ("graph_limit_bytes", U64),
        ("graph_bytes", U64),
        ("n_launches", U64),
    )


class Rows(ct.Structure):
    _fields_ = (
        ("data", Ptr),
        ("row_stride", U64),
        ("kernel_type", U32),
        ("n_cols", U32),
        ("n_rows", U32),
        ("on_host", U32),
    )


class Product(ct.Structure):
    _fields_ = (("rows", Rows), ("bias", Ptr), ("out", Ptr), ("add", U32), ("relu", U32))


class Norm(ct.Structure):
    _fields_ = (("gain", Ptr), ("eps", F32), ("out", Ptr))


class Predictor(ct.Structure):
    _fields_ = (
        ("fc2", Rows),
        ("hidden", Ptr),
        ("threshold", F32),
        ("logits", Ptr),
        ("mask", Ptr),
    )


class Neurons(ct.Structure):
    _fields_ = (
        ("gate", Rows),
        ("up", Rows),
        ("x", Ptr),
        ("norm", ct.POINTER(Norm)),
        ("mask", Ptr),
        ("predictor", ct.POINTER(Predictor)),
        ("activation", U32),
        ("threshold", F32),
        ("n_masked", Ptr),
        ("n_active", Ptr),
        ("out", Ptr),
    )


class Step(ct.Structure):
    _fields_ = (
        ("n_tokens", U32),
        ("table_stride", U32),
        ("table", Ptr),
        ("sequence", Ptr),
        ("slot", Ptr),
        ("oldest", Ptr),
        ("old_length", Ptr),
        ("tree", Ptr),
        ("tree_words", U32),
        ("most_pages", U32),
    )


class Kv(ct.Structure):
    _fields_ = (
        ("base", Ptr),
        ("page_bytes", U64),
        ("half_precision", U32),
        ("n_kv_heads", U32),
        ("head_dim", U32),
    )


class Rope(ct.Structure):
    _fields_ = (("n_heads", U32), ("n_rot", U32), ("cosine", Ptr), ("sine", Ptr))


class Attention(ct.Structure):
    _fields_ = (
        ("kv", Kv),
        ("step", Step),
        ("n_heads", U32),
        ("q", Ptr),
        ("out", Ptr),
        ("lse", Ptr),
        ("tiles", Ptr),
        ("n_tiles", U32),
    )


class Post(ct.Structure):
    _fields_ = (
        ("base", Ptr),
        ("order", U32),
        ("out_stride", U32),
        ("out", Ptr),
        ("stamp", Ptr),
    )


class PostX(ct.Structure):
    _fields_ = (
        ("post", Post),
        ("n_tokens", U32),
        ("n_embd", U32),
        ("x", Ptr),
        ("norm", Norm),
    )


class Mask(ct.Structure):
    _fields_ = (
        ("predictor", ct.POINTER(Predictor)),
        ("logits", Ptr),
        ("n_tokens", U32),
        ("n", U32),
        ("threshold", F32),
        ("first_word", U32),
        ("words", Ptr),
        ("post", Post),
    )


class Merge(ct.Structure):
    _fields_ = (
        ("base", Ptr),
        ("order", U32),
        ("n_tokens", U32),
        ("n_embd", U32),
        ("gate", Ptr),
        ("abandoned", Ptr),
        ("late", Ptr),
        ("given_up", Ptr),
        ("limit_ns", U64),
        ("share", Ptr * 2),
        ("answer", Ptr),
        ("answer_stride", U64),
        ("y", Ptr),
        ("stamp", Ptr),
    )


def _function(*arguments: Any) -> Any:
    return ct.CFUNCTYPE(I32, *arguments)


class Api(ct.Structure):
    _fields_ = (
        ("abi", U32),
        ("error", ct.CFUNCTYPE(ct.c_char_p)),
        ("count", _function(ct.POINTER(U32))),
        ("open", _function(U32, U64, ct.POINTER(Ptr))),
        ("close", ct.CFUNCTYPE(None, Ptr)),
        ("info", _function(Ptr, ct.POINTER(Info))),
        ("reserve", _function(Ptr, U64, U64, U64, U64)),
        ("allocate", _function(Ptr, U64, ct.POINTER(Ptr))),
        ("release", _function(Ptr, Ptr)),
        ("upload", _function(Ptr, Ptr, U64, Ptr)),
        ("download", _function(Ptr, Ptr, U64, Ptr)),
        ("copy", _function(Ptr, Ptr, U64, Ptr)),
        ("zero", _function(Ptr, Ptr, U64)),
        ("synchronize", _function(Ptr)),
        ("measure_read", _function(Ptr, U32, U64, F32, ct.POINTER(U64))),
        ("begin_capture", _function(Ptr)),
        ("end_capture", _function(Ptr, ct.POINTER(Ptr))),
        ("launch_graph", _function(Ptr, Ptr)),
        ("release_graph", _function(Ptr, Ptr)),
        ("row_stride", ct.CFUNCTYPE(U64, U32, U32)),
        ("upload_rows", _function(Ptr, Ptr, U64, ct.POINTER(Rows))),
        ("bring", _function(Ptr, U32, Ptr, U64, Ptr)),
        ("await_brought", _function(Ptr, U32)),
        ("take_apart", _function(Ptr, Ptr, U64, ct.POINTER(Rows))),
        ("fetch_rows", _function(Ptr, ct.POINTER(Rows), Ptr, U32, Ptr)),
        ("multiply", _function(Ptr, ct.POINTER(Product), U32, Ptr, U32, ct.POINTER(Norm))),
        ("neurons", _function(Ptr, ct.POINTER(Neurons))),
        ("multiply_transposed", _function(Ptr, ct.POINTER(Rows), Ptr, U32, U32, Ptr)),
        ("gather", _function(Ptr, Ptr, Ptr, U32, U32, Ptr)),
        ("rms_norm", _function(Ptr, Ptr, Ptr, U32, U32, F32, Ptr)),
        ("gated", _function(Ptr, U32, F32, Ptr, U64, Ptr, Ptr)),
        ("log_probabilities", _function(Ptr, Ptr, U32, U32, Ptr, Ptr)),
        ("top", _function(Ptr, Ptr, U32, U32, U32, Ptr)),
        ("record", _function(Ptr, Ptr, U32, Ptr)),
        (
            "place_heads",
            _function(Ptr, ct.POINTER(Kv), ct.POINTER(Step), ct.POINTER(Rope), Ptr, Ptr, Ptr),
        ),
        ("attend", _function(Ptr, ct.POINTER(Attention))),
        ("mask", _function(Ptr, ct.POINTER(Mask))),
        ("hide", _function(Ptr, Ptr, U32, U32, U32, Ptr, Ptr)),
        ("allocate_host", _function(Ptr, U64, ct.POINTER(Ptr), ct.POINTER(Ptr))),
        ("release_host", _function(Ptr, Ptr)),
        ("query", _function(Ptr, ct.POINTER(U32))),
        ("waits", _function(Ptr, ct.POINTER(U32), ct.POINTER(U32))),
        ("post", _function(Ptr, ct.POINTER(PostX))),
        ("merge", _function(Ptr, ct.POINTER(Merge))),
        ("stamp", _function(Ptr, Ptr)),
    )


class DeviceError(Exception):
    """A failed call: status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def library_path(name: str) -> Path:
    """libpi_<name>.so beside the library that PI_LIB names."""
    return Path(os.environ.get("PI_LIB", "libpi.so")).resolve().parent / f"libpi_{name}.so"


class Device:
    """An open device; arrays live until release_all()."""

    def __init__(self, path: Path, budget_bytes: int = 0) -> None:
        library = ct.CDLL(str(path))
        library.pi_gpu_api_get.restype = ct.POINTER(Api)
        api = library.pi_gpu_api_get(U32(ABI))
        assert api, "the library was built for another interface"
        self.api = api.contents
        self.arrays: list[int] = []
        self.handle = Ptr()
        self._check(self.api.open(0, budget_bytes, ct.byref(self.handle)))

    def _check(self, status: int) -> None:
        if status != 0:
            raise DeviceError(status, self.api.error().decode())

    def __getattr__(self, name: str) -> Any:
        """An operation of the interface, with the device and the status check added."""
        function = getattr(self.api, name)
        return lambda *arguments: self._check(function(self.handle, *arguments))

    def close(self) -> None:
        self.api.close(self.handle)

    def empty(self, n_bytes: int) -> int:
        out = Ptr()
        self._check(self.api.allocate(self.handle, n_bytes, ct.byref(out)))
        assert out.value
        self.arrays.append(out.value)
        return out.value

    def release_all(self) -> None:
        for data in self.arrays:
            self._check(self.api.release(self.handle, data))
        self.arrays.clear()

    def put(self, array: np.ndarray) -> int:
        """A copy of the array on the device."""
        array = np.ascontiguousarray(array)
        to = self.empty(array.nbytes)
        self.upload(array.ctypes.data, array.nbytes, to)
        return to

    def poisoned(self, shape: Sequence[int] | int, dtype: Any = np.float32) -> int:
        """An array of NaN (or -1): what an operation does not write is seen."""
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.put(np.full(n_bytes, 0xFF, np.uint8))

    def get(self, data: int, shape: Sequence[int] | int, dtype: Any = np.float32) -> np.ndarray:
        out = np.empty(shape, dtype)
        self.download(data, out.nbytes, out.ctypes.data)
        self.synchronize()
        return out

    def rows(self, kind: str, data: np.ndarray, n_cols: int) -> Rows:
        """Rows of a matrix, [n_rows, row bytes] as the file has them."""
        data = np.ascontiguousarray(data)
        stride = self.api.row_stride(KERNEL_TYPES[kind], n_cols)
        assert stride >= data.shape[1]
        rows = Rows(self.empty(stride * len(data)), stride, KERNEL_TYPES[kind], n_cols, len(data))
        self.upload_rows(data.ctypes.data, data.shape[1], ct.byref(rows))
        return rows

    def info_now(self) -> Info:
        info = Info()
        self.info(ct.byref(info))
        return info


@contextmanager
def opened(name: str, budget_bytes: int = 0) -> Iterator[Device]:
    """A device of the library libpi_<name>.so."""
    device = Device(library_path(name), budget_bytes)
    try:
        yield device
    finally:
        device.close()
