"""The driver's own account of a device's memory."""

from __future__ import annotations

import ctypes as ct


class _Memory(ct.Structure):
    _fields_ = [("total", ct.c_ulonglong), ("free", ct.c_ulonglong), ("used", ct.c_ulonglong)]


class Nvml:
    """The driver's own account of device 0."""

    def __init__(self) -> None:
        self._library = ct.CDLL("libnvidia-ml.so.1")
        self._device = ct.c_void_p()
        self._check(self._library.nvmlInit_v2())
        self._check(self._library.nvmlDeviceGetHandleByIndex_v2(0, ct.byref(self._device)))

    def used_bytes(self) -> int:
        """Bytes that are in use, by all programs and the driver."""
        memory = _Memory()
        self._check(self._library.nvmlDeviceGetMemoryInfo(self._device, ct.byref(memory)))
        return memory.used

    @staticmethod
    def _check(status: int) -> None:
        if status != 0:
            raise OSError(f"NVML failed with status {status}")
