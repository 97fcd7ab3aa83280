"""Shared memory of kernels is declared as what it is read as: an array of floats starts at any multiple of four bytes.

The emulator runs on a processor that reads at any address, so nothing else but a GPU would notice.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CUDA = Path(__file__).parents[2] / "runtime/native/cuda"
SHARED = re.compile(r"__shared__ (?:alignas\(\d+\) )?(\w+) (\w+)\[")
WIDE = frozenset({"float2", "float4", "uint2", "uint4", "uint64_t"})


def casts(text: str) -> list[str]:
    """Shared arrays of narrow elements whose address is cast to a wide type."""
    narrow = [name for kind, name in SHARED.findall(text) if kind not in WIDE]
    wide = "|".join(sorted(WIDE))
    return [
        name
        for name in narrow
        if re.search(rf"reinterpret_cast<[^>]*\b(?:{wide})\b[^>]*>\(&?{name}\b", text)
    ]


def test_the_check_finds_a_cast() -> None:
    fault = "__shared__ float out[8];\nreinterpret_cast<float2 *>(out)[0] = x;"
    assert casts(fault) == ["out"]
    assert casts(fault.replace("float out", "float2 out")) == []


@pytest.mark.parametrize("path", sorted(CUDA.glob("*.cu*")), ids=lambda path: path.name)
def test_shared_memory_is_aligned_as_it_is_read(path: Path) -> None:
    assert casts(path.read_text()) == []
