"""Any metadata that gguf-py writes is read as it was; texts that are not UTF-8 are refused by name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import GGUFValueType as Kind
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.tokenizer import Tokenizer

HEADER_BYTES, COUNT_AT = 24, 16  # magic, version, number of tensors, number of keys
ARCHITECTURE_KEY_BYTES = 8 + len("general.architecture") + 4 + 8 + len("llama")
ALIGNMENT = 32

INTEGERS = {
    Kind.UINT8: (0, 2**8), Kind.INT8: (-(2**7), 2**7), Kind.UINT16: (0, 2**16), Kind.INT16: (-(2**15), 2**15),
    Kind.UINT32: (0, 2**32), Kind.INT32: (-(2**31), 2**31), Kind.UINT64: (0, 2**64), Kind.INT64: (-(2**63), 2**63),
}  # fmt: skip
SCALARS = {kind: st.integers(low, high - 1) for kind, (low, high) in INTEGERS.items()} | {
    Kind.FLOAT32: st.floats(width=32, allow_nan=False),
    Kind.FLOAT64: st.floats(allow_nan=False),
    Kind.BOOL: st.booleans(),
    Kind.STRING: st.text(max_size=30),
}
VALUES = st.sampled_from(sorted(SCALARS)).flatmap(
    lambda kind: st.one_of(
        st.tuples(st.just(kind), st.none(), SCALARS[kind]),
        st.tuples(
            st.just(Kind.ARRAY), st.just(kind), st.lists(SCALARS[kind], min_size=1, max_size=9)
        ),
    )
)
NAMES = st.text(alphabet="abcxyz0189_.-", min_size=1, max_size=30).map("test.{}".format)


@pytest.fixture(scope="module")
def plain(synthetic_gguf: Callable[..., Path]) -> bytes:
    """A small model file."""
    return synthetic_gguf(
        n_layers=1, n_embd=32, n_ff=32, n_heads=2, n_kv_heads=2, n_vocab=293
    ).read_bytes()


def packed(folder: Path, keys: dict[str, Any]) -> bytes:
    """The keys as gguf-py writes them."""
    writer = gguf.GGUFWriter(folder / "keys", "llama")
    for name, (kind, element, value) in keys.items():
        writer.add_key_value(name, value, kind, element)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return (folder / "keys").read_bytes()[HEADER_BYTES + ARCHITECTURE_KEY_BYTES :]


def with_keys(plain: bytes, blob: bytes, n_keys: int) -> bytes:
    """The file with more keys in front, and one that keeps the data aligned."""
    filler = -(len(blob) + 8 + 4 + 4 + 8) % ALIGNMENT
    blob += struct.pack("<Q4sIQ", 4, b"fill", Kind.STRING, filler) + b"x" * filler
    (count,) = struct.unpack_from("<Q", plain, COUNT_AT)
    header = plain[:COUNT_AT] + struct.pack("<Q", count + n_keys + 1)
    return header + blob + plain[HEADER_BYTES:]


@given(keys=st.dictionaries(NAMES, VALUES, max_size=8))
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_metadata_is_read_as_written(
    tmp_path: Path, plain: bytes, keys: dict[str, Any]
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(with_keys(plain, packed(tmp_path, keys), len(keys)))
    with ModelFile(path) as file:
        assert file.keys()[: len(keys)] == list(keys)
        for name, (_, _, value) in keys.items():
            assert file.metadata(name) == value
            assert type(file.metadata(name)) is type(value)
        assert file.metadata("test") is None
    path.unlink()
    (tmp_path / "keys").unlink()


@pytest.mark.parametrize(
    "bad", [b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"a\x80b", b"\xf5\x80\x80\x80"]
)
def test_texts_that_are_not_utf_8(bad: bytes, plain: bytes, tmp_path: Path) -> None:
    text = struct.pack("<Q", len(bad)) + bad
    alone = struct.pack("<Q6sI", 6, b"test.a", Kind.STRING) + text
    listed = struct.pack("<Q6sIIQ", 6, b"test.b", Kind.ARRAY, Kind.STRING, 1) + text
    path = tmp_path / "model.gguf"
    path.write_bytes(with_keys(plain, alone + listed, 2))
    with ModelFile(path) as file:
        for name in ("test.a", "test.b"):
            with pytest.raises(PiError, match=f"{name} holds a text that is not UTF-8"):
                file.metadata(name)


def test_a_token_that_is_not_utf_8(plain: bytes, tmp_path: Path) -> None:
    at = plain.index(b"<s>")
    path = tmp_path / "model.gguf"
    path.write_bytes(plain[:at] + b"\xff\xff\xff" + plain[at + 3 :])
    with (
        ModelFile(path) as file,
        pytest.raises(PiError, match=r"tokenizer\.ggml\.tokens holds a text that is not UTF-8"),
    ):
        Tokenizer.from_metadata(file.metadata, file.shape.n_vocab)
