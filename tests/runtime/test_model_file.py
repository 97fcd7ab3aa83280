"""Metadata and tensors of a file as gguf-py wrote them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType as Kind

from parity import synthetic
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime.model_file import ModelFile

VALUES = {
    "u8": (Kind.UINT8, 200),
    "i8": (Kind.INT8, -100),
    "u16": (Kind.UINT16, 60000),
    "i16": (Kind.INT16, -30000),
    "u32": (Kind.UINT32, 4 * 10**9),
    "i32": (Kind.INT32, -(2**31)),
    "f32": (Kind.FLOAT32, 0.5),
    "bool": (Kind.BOOL, True),
    "text": (Kind.STRING, "größer 🦙"),
    "empty": (Kind.STRING, ""),
    "u64": (Kind.UINT64, 2**64 - 1),
    "i64": (Kind.INT64, -(2**63)),
    "f64": (Kind.FLOAT64, 0.1),
}
ARRAYS = {
    "numbers": (Kind.INT32, [1, -2, 3]),
    "floats": (Kind.FLOAT32, [0.25, -1.5]),
    "flags": (Kind.BOOL, [True, False]),
    "texts": (Kind.STRING, ["", "ä", "a\nb", "x" * 1000]),
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "keys.gguf"
    shape = synthetic.Shape()
    weights = synthetic.dense_layout(synthetic.random_weights(shape, 0))
    plain = gguf.GGUFWriter

    class Writer(plain):
        def write_header_to_file(self, path=None):
            for name, (kind, value) in VALUES.items():
                self.add_key_value(f"test.{name}", value, kind)
            for name, (kind, values) in ARRAYS.items():
                self.add_key_value(f"test.{name}", values, Kind.ARRAY, sub_type=kind)
            super().write_header_to_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        synthetic.write_gguf(path, shape, weights)
    with ModelFile(path) as opened:
        yield opened


@pytest.mark.parametrize("name", VALUES)
def test_scalars(file, name):
    value = file.metadata(f"test.{name}")
    assert value == VALUES[name][1]
    assert type(value) is type(VALUES[name][1])


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(file, name):
    assert file.metadata(f"test.{name}") == ARRAYS[name][1]


def test_keys_are_those_of_gguf_py(file):
    fields = gguf.GGUFReader(file.path).fields
    assert file.keys() == [name for name in fields if not name.startswith("GGUF.")]


def test_tensors_are_those_of_gguf_py(file):
    want = [
        (tensor.name, int(tensor.tensor_type), tuple(map(int, tensor.shape)), int(tensor.n_bytes))
        for tensor in gguf.GGUFReader(file.path).tensors
    ]
    assert [(t.name, t.type, t.shape, t.n_bytes) for t in file.tensors()] == want


def test_shape(file):
    shape = file.shape
    want = synthetic.Shape()
    for name in ("n_layers", "n_embd", "n_ff", "n_vocab", "n_heads", "n_kv_heads", "head_dim"):
        assert getattr(shape, name) == getattr(want, name)
    assert shape.n_ctx_train == want.n_ctx
    assert shape.float32_weights
    assert not shape.tied_head
    assert shape.rms_eps == np.float32(1e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [("powerinfer.predictor.perplexity_loss", "low"), ("powerinfer.predictor.kind", 3)],
)
def test_keys_of_the_wrong_type_are_named(tmp_path, key, value):
    shape = synthetic.Shape(n_layers=1)
    weights = synthetic.dense_layout(synthetic.random_weights(shape, 0))
    path = synthetic.write_gguf(tmp_path / "bad.gguf", shape, weights, keys={key: value})
    with pytest.raises(PiError, match=key):
        ModelFile(path)
