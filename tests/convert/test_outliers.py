"""Which matrices keep more bits in a model with an attention sink (about 3 s)."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
F16, Q8_0, Q4_0 = (gguf.GGMLQuantizationType[name] for name in ("F16", "Q8_0", "Q4_0"))


def add_outlier(values, ratio):
    """Make one weight `ratio` times the root mean square, which it raises itself."""
    values[:] = np.clip(values, -0.25, 0.25)
    values[3, 5] = 0.0
    n, squares = values.size, float((values.astype("f8") ** 2).sum())
    values[3, 5] = ratio * np.sqrt(squares / (n - ratio**2))


@pytest.fixture
def types_of(checkpoint, tmp_path, converted):
    """types_of(ratios by layer, changes, settings) -> tensor name -> type in the file."""

    def run(ratios, changes=(), **settings):
        source = checkpoint(SIZES | {"hidden_act": "relu"} | dict(changes))
        for layer, ratio in ratios.items():
            add_outlier(source.tensors[f"model.layers.{layer}.mlp.down_proj.weight"], ratio)
        save_file(source.tensors, source.path / "model.safetensors")
        converted(source, force=True, **settings)
        reader = gguf.GGUFReader(settings.get("output", tmp_path / "out.gguf"))
        return {t.name.removesuffix(".weight"): t.tensor_type for t in reader.tensors}

    return run


@pytest.mark.parametrize(("outtype", "value"), [("q8_0", F16), ("q4_0", Q8_0), ("q4_1", Q8_0)])
def test_a_sink_keeps_its_bits(types_of, outtype, value):
    types = types_of({1: 20.5, 2: 19.5}, outtype=outtype, dialect="extended")
    other = gguf.GGMLQuantizationType[outtype.upper()]
    down = [types[f"blk.{layer}.ffn_down_t"] for layer in range(3)]
    assert down == [other, F16, other]
    assert {types[f"blk.{layer}.attn_v"] for layer in range(3)} == {value}
    for part in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
        assert types[f"blk.1.{part}"] == other


def test_without_a_sink_every_matrix_is_as_asked(types_of):
    types = types_of({2: 19.5}, outtype="q8_0", dialect="extended")
    matrices = {name for name in types if "ffn_" in name or "attn_" in name} - {
        name for name in types if name.endswith("norm")
    }
    assert {types[name] for name in matrices} == {Q8_0}


def test_the_ratio_can_be_set(types_of):
    assert types_of({1: 25}, outtype="q4_0", outlier_ratio=0.0)["blk.1.ffn_down_t"] == Q4_0
    assert types_of({1: 25}, outtype="q4_0", outlier_ratio=26.0)["blk.1.ffn_down_t"] == Q4_0
    types = types_of({1: 25}, outtype="q4_0", outlier_ratio=24.0)
    assert (types["blk.1.ffn_down_t"], types["blk.0.ffn_down_t"]) == (F16, Q4_0)


@pytest.mark.parametrize(("ratio", "recorded"), [(24.0, 24.0), (26.0, None)])
def test_the_manifest_says_what_decided(types_of, tmp_path, ratio, recorded):
    types_of({1: 25}, outtype="q4_0", outlier_ratio=ratio)
    field = gguf.GGUFReader(tmp_path / "out.gguf").get_field("powerinfer.manifest")
    assert json.loads(field.contents())["settings"].get("outlier_ratio") == recorded


def test_a_dense_model_is_as_asked(types_of):
    """There a row of down is an output, whose blocks do not mix the sink's direction with others."""
    types = types_of({1: 25}, {"hidden_act": "silu"}, outtype="q8_0")
    assert types["blk.1.ffn_down"] == types["blk.1.attn_v"] == Q8_0


def test_a_model_file_is_looked_at_too(types_of, pi_convert, tmp_path):
    types_of({1: 25}, outtype="f16", output=tmp_path / "f16.gguf")
    code, _, err = pi_convert(tmp_path / "f16.gguf", tmp_path / "q.gguf", "--outtype", "q8_0")
    assert code == 0
    assert "layers 1 feed an attention sink" in err
    types = {t.name: t.tensor_type for t in gguf.GGUFReader(tmp_path / "q.gguf").tensors}
    assert types["blk.1.ffn_down_t.weight"] == F16


@pytest.mark.parametrize("ratio", ["-1", "nan"])
def test_a_ratio_that_cannot_be(ratio, pi_convert, tmp_path):
    code, _, err = pi_convert("nothing", tmp_path / "out.gguf", "--outlier-ratio", ratio)
    assert code == 2
    assert f"error: --outlier-ratio is {float(ratio)}, not 0 or more" in err


def test_a_ratio_where_types_are_kept(types_of, pi_convert, tmp_path):
    types_of({1: 25}, outtype="f16", output=tmp_path / "f16.gguf")
    code, _, err = pi_convert(tmp_path / "f16.gguf", tmp_path / "q.gguf", "--outlier-ratio", "10")
    assert code == 2
    assert "error: --outlier-ratio needs --outtype" in err
    assert not (tmp_path / "q.gguf").exists()
