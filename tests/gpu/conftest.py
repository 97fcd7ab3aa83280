"""Devices under test: the emulated one wherever it was built, and the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu.device import Device, DeviceError, library_path, opened

EMULATED, CUDA = "gpu_emulated", "cuda"
DEVICES = [
    pytest.param(EMULATED, id="emulated"),
    pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu),
]


def require_library(name: str) -> None:
    """Skip where the library was not built; on a machine with a driver `make gpu-test` builds both."""
    if not library_path(name).exists():
        pytest.skip(f"no {library_path(name).name} beside PI_LIB")


@pytest.fixture(scope="session", params=DEVICES)
def device_name(request: pytest.FixtureRequest) -> str:
    require_library(request.param)
    return str(request.param)


@pytest.fixture(scope="session")
def _device(device_name: str) -> Iterator[Device]:
    with opened(device_name) as device:
        yield device


@pytest.fixture
def device(_device: Device) -> Iterator[Device]:
    """An open device, empty again after the test."""
    yield _device
    try:
        _device.synchronize()
        _device.release_all()
    except DeviceError as failure:
        pytest.exit(f"the device is lost, and with it this process: {failure}", 1)
