"""What the native objects export: nothing that one instruction set could lend to another."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from powerinfer_toolkit.runtime import native_lib

TABLES = {
    "x86": ("scalar", "avx2", "avx512", "avx512_bf16", "amx"),
    "arm": ("scalar", "neon", "neon_dotprod", "neon_i8mm"),
}
ALSO = ("amx_emulated",)  # a table for tests
COMPILER_DATA = ("DW.ref.", "__odr_asan.")  # no code: the unwinder's and the address sanitizer's

needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(kind, name) as nm prints them."""
    command = ["nm", "--format=posix", *options, str(path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [(line.split()[1], line.split()[0].split("@")[0]) for line in lines]


def kernel_objects() -> list[Path]:
    return sorted(native_lib.library_path().parent.glob("**/kernels/*.o"))


@needs_nm
def test_kernels_share_no_symbols() -> None:
    """A weak or unique symbol of a file compiled with -mavx512f could become everyone's copy of it."""
    objects = kernel_objects()
    if not objects:
        pytest.skip("the library is not in its build folder")
    tables = TABLES["arm" if platform.machine() in ("aarch64", "arm64") else "x86"]
    assert {f"{table}.cpp.o" for table in tables} <= {path.name for path in objects}
    shared = [(path.name, *symbol) for path in objects for symbol in symbols(path)]
    shared = [symbol for symbol in shared if not symbol[2].startswith(COMPILER_DATA)]
    assert [symbol for symbol in shared if symbol[1] in "WwVvu"] == []
    exported = {name for _, kind, name in shared if kind.isupper() and kind != "U"}
    assert exported <= {
        f"{kind}_{table}" for kind in ("pi_kernels", "pi_cpu_has") for table in (*tables, *ALSO)
    }


@needs_nm
def test_library_exports_the_interface_only() -> None:
    exported = {name for kind, name in symbols(native_lib.library_path(), "-D", "--defined-only")}
    assert exported == set(native_lib.PROTOTYPES)
