"""Devices under test: the emulated one wherever it was built, and the GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu.device import Device, DeviceError, library_path, opened
from gpu.models import MICRO, SHAPES_OF_TESTS, Synth, has_driver
from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime.plan import surroundings
from powerinfer_toolkit.runtime.plan.profile import UNMEASURED
from powerinfer_toolkit.runtime.synth.shapes import SHAPES
from powerinfer_toolkit.runtime.synth.write import SynthSettings, write_synth

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


@pytest.fixture(autouse=True)
def assumed_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that do not depend on how fast this machine reads, which the emulator would take minutes to tell."""
    monkeypatch.setattr(surroundings, "machine_profile", lambda *_, **__: UNMEASURED)


@pytest.fixture(scope="module")
def device_library() -> Iterator[None]:
    """Without a driver libpi loads the emulated device instead; it does so once a process."""
    if has_driver():
        require_library(CUDA)
        yield
        return
    require_library(EMULATED)
    os.environ["PI_GPU_LIB"] = str(library_path(EMULATED))
    yield
    del os.environ["PI_GPU_LIB"]


@pytest.fixture(scope="module")
def synth(tmp_path_factory: pytest.TempPathFactory, device_library: None) -> Iterator[Synth]:
    """synth(outtype, dense_twin=False, shape=MICRO) -> random weights with predictors, made once."""
    made: dict[tuple[object, ...], Path] = {}
    SHAPES.update({shape.name: shape for shape in SHAPES_OF_TESTS})

    def write(outtype: str, dense_twin: bool = False, shape: str = MICRO.name) -> Path:
        key = (outtype, dense_twin, shape)
        if key not in made:
            path = tmp_path_factory.mktemp("synth") / f"{outtype}.gguf"
            kind = TensorType[outtype.upper()]
            write_synth(SynthSettings(shape, path, kind, dense_twin=dense_twin))
            made[key] = path
        return made[key]

    yield write
    for shape in SHAPES_OF_TESTS:
        del SHAPES[shape.name]
