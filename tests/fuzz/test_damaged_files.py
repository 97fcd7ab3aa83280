"""Damaged models through Model.load and everything that reads the file in Python: PiError or nothing.

The native reader meets every single damage in `make asan` (runtime/native/tests/mutate_gguf.cpp); this is a
sample of them for the layers above it: metadata, planner, tokenizer, chat template, generation.
"""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest

from fuzz.golden import write_all
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime import Model, native_lib
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.sampling import Sampling

N_CASES = 1000  # of each file
KINDS = ("upstream", "extended", "dense")
NUMBERS = [0, 1, 2**7, 2**15, 2**31 - 1, 2**32 - 1, 2**40, 2**63, 2**64 - 1]
TEXTS = [b"\0", b"\xff\xfe", b"\xf0\x9f\xa6", b"{{", b"%}", b"%s", b"../", b"\x1b[2J"]
ONE_TOKEN = {"n_predict": 1, "sampling": Sampling(temperature=0), "ignore_eos": True}


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> dict[str, bytes]:
    paths = write_all(tmp_path_factory.mktemp("golden"))
    return {path.stem: path.read_bytes() for path in paths}


@dataclass(frozen=True)
class Header:
    """Size of a header and where in it the values of keys are: (begin, end), strings one by one."""

    n_bytes: int
    values: list[tuple[int, int]]


def read_header(data: bytes, folder: Path) -> Header:
    path = folder / "header"
    path.write_bytes(b"GGUF" + data[4:])  # gguf-py knows this magic only
    reader = gguf.GGUFReader(path)
    base = reader.data.ctypes.data
    parts = [field.parts[i] for field in reader.fields.values() for i in field.data]
    begins = [part.ctypes.data - base for part in parts]
    values = [(at, at + part.nbytes) for at, part in zip(begins, parts, strict=True) if at >= 24]
    return Header(reader.data_offset, values)


def damaged(original: bytes, header: Header, n: int) -> Iterator[bytes]:
    """Mostly values, which the native reader lets through, and anything in the header besides."""
    rng = random.Random(0)
    for _ in range(n):
        data = bytearray(original)
        for _ in range(rng.choice([1, 1, 2, 4, 8])):
            whole = (0, header.n_bytes)
            begin, end = rng.choice(header.values) if rng.random() < 0.9 else whole
            at = rng.randrange(begin, end)
            replacement = rng.choice(
                [
                    bytes([data[at] ^ 1 << rng.randrange(8)]),
                    struct.pack("<Q", rng.choice(NUMBERS)),
                    rng.choice(TEXTS),
                    bytes(data[slice(*rng.choice(header.values))]),
                ]
            )[: end - at]
            data[at : at + len(replacement)] = replacement
        yield bytes(data)


def write(path: Path, data: bytes) -> Path:
    """A new file each time: cutting one that was just written makes ext4 wait for the disk."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def use(path: Path) -> None:
    """All that a program does with a file; generation only where there is something to start from."""
    with ModelFile(path) as file:
        for key in file.keys():  # noqa: SIM118 - a method that lists names
            file.metadata(key)
        list(file.tensors())
    with Model.load(path, threads=1, batch=4) as model:
        tokenizer = model.tokenizer
        ids = tokenizer.encode("in the end <s> x")
        tokenizer.decode(ids)
        model.score([0, 1, 2])
        list(model.generate([0, *ids[:20]], **ONE_TOKEN))


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_file_works(kind, golden, tmp_path):
    use(write(tmp_path / "model.gguf", golden[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_an_error_or_harmless(kind, golden, tmp_path, capfd):
    said = []
    for data in damaged(golden[kind], read_header(golden[kind], tmp_path), N_CASES):
        try:
            use(write(tmp_path / "model.gguf", data))
        except PiError as failure:
            said.append(failure.message + failure.hint)
    assert N_CASES // 4 < len(said) < N_CASES  # damage is found, and not everything is damage
    assert not [text for text in said if any(c < " " or c == "\x7f" for c in text)]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("kind", KINDS)
def test_files_cut_anywhere(kind, golden, tmp_path):
    for size in range(0, len(golden[kind]) - 1, 641):
        with pytest.raises(PiError):
            use(write(tmp_path / "model.gguf", golden[kind][:size]))


MANY = 200_000  # times 19 or 41 bytes is a multiple of every alignment


def with_many_keys(original: bytes) -> bytes:
    """Unsigned bytes under names of six characters, before the keys that mean something."""
    keys = (struct.pack("<Q6sIB", 6, f"{i:06x}".encode(), 0, 7) for i in range(MANY))
    n_tensors, n_keys = struct.unpack_from("<QQ", original, 8)
    counts = struct.pack("<QQ", n_tensors, n_keys + MANY)
    return original[:8] + counts + b"".join(keys) + original[24:]


def with_many_tensors(original: bytes, header: Header) -> bytes:
    """Descriptions of one float each, all at the same place, after those that mean something."""
    end = original.rindex(b"weight", 0, header.n_bytes) + 6 + 4 + 2 * 8 + 4 + 8  # of a matrix
    tensors = (struct.pack("<Q9sIQIQ", 9, b"%09d" % i, 1, 1, 0, 0) for i in range(MANY))
    n_tensors, n_keys = struct.unpack_from("<QQ", original, 8)
    counts = struct.pack("<QQ", n_tensors + MANY, n_keys)
    return original[:8] + counts + original[24:end] + b"".join(tensors) + original[end:]


def test_long_lists_are_read_in_small_pieces(golden, tmp_path):
    """What a stranger makes long is not searched one by one, and no single allocation is large."""
    path = write(tmp_path / "model.gguf", with_many_keys(golden["dense"]))
    assert refused_by_the_fuzz_program(path) in (False, None)
    with ModelFile(path) as file:
        assert len(file.keys()) > MANY
    header = read_header(golden["dense"], tmp_path)
    write(path, with_many_tensors(golden["dense"], header))
    with pytest.raises(PiError, match="no use for tensor 000000000"):
        ModelFile(path)
    assert refused_by_the_fuzz_program(path) in (True, None)


def refused_by_the_fuzz_program(path: Path) -> bool | None:
    """What runtime/native/tests/mutate_gguf.cpp says, None where it was not built; it fails on a large allocation."""
    program = native_lib.library_path().with_name("pi_fuzz_gguf")
    if not program.exists():
        return None
    plain = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "ASAN_OPTIONS")}
    command = [str(program), "--as-it-is", str(path)]
    done = subprocess.run(command, env=plain, capture_output=True, text=True, check=True)
    return "1 cases, 0 accepted" in done.stdout
