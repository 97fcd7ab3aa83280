"""Which matrix takes which type: llama.cpp's mixtures, written out by hand here, and what replaces K types (about 5 s)."""

import gguf
import numpy as np
import pytest

from parity.gguf_file import GgufFile
from powerinfer_toolkit.convert.cli import OUTTYPES
from powerinfer_toolkit.convert.outtypes import OutType

K_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 270,
}
# Of 32 layers: the first and last eighth, and every third from the fourth on.
MORE_OF_32 = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
# Of 10 layers: 10 // 8 = 1 and 70 // 8 = 8.
MORE_OF_10 = {0, 3, 6, 8, 9}
# outtype -> base, then layers of attn_v and ffn_down by type, attn_output's type
MIXTURES_OF_32 = {
    "q4_k_m": ("Q4_K", {"Q6_K": MORE_OF_32}, {"Q6_K": MORE_OF_32}, "Q4_K"),
    "q4_k_s": ("Q4_K", {"Q5_K": {0, 1, 2, 3}}, {"Q5_K": {0, 1, 2, 3}}, "Q4_K"),
    "q5_k_m": ("Q5_K", {"Q6_K": MORE_OF_32}, {"Q6_K": MORE_OF_32}, "Q5_K"),
    "q5_k_s": ("Q5_K", {}, {}, "Q5_K"),
    "q6_k": ("Q6_K", {}, {}, "Q6_K"),
    "q3_k_m": (
        "Q3_K",
        {"Q5_K": {0, 1}, "Q4_K": set(range(2, 32))},
        {"Q5_K": {0, 1}, "Q4_K": set(range(2, 32))},
        "Q4_K",
    ),
    "q2_k": ("Q2_K", {"Q3_K": set(range(32))}, {"Q3_K": set(range(32))}, "Q3_K"),
}
FILE_TYPES = {"q4_k_m": 15, "q4_k_s": 14, "q5_k_m": 17, "q5_k_s": 16, "q6_k": 18, "q3_k_m": 12}
FILE_TYPES |= {"q2_k": 10, "q4_1": 3, "q5_0": 8, "q5_1": 9, "iq4_nl": 25}


@pytest.fixture
def types_of(hollow_checkpoint, pi_convert, tmp_path):
    """types_of(changes, outtype) -> tensor name -> type, from the dry run's table; and stderr."""

    def run(changes, outtype, *options):
        command = (
            hollow_checkpoint(changes),
            tmp_path / "m.gguf",
            "--outtype",
            outtype,
            "--dry-run",
            *options,
        )
        code, out, err = pi_convert(*command)
        assert code == 0, err
        rows = (line.split() for line in out.splitlines())
        return {row[0].removesuffix(".weight"): row[-2] for row in rows}, err

    return run


def expected_types(n_layers, base, attn_v, ffn_down, attn_output, down="ffn_down"):
    expected = {}
    for layer in range(n_layers):
        names = ("attn_q", "attn_k", "ffn_gate", "ffn_up")
        expected |= {f"blk.{layer}.{name}": base for name in names}
        expected[f"blk.{layer}.attn_output"] = attn_output
        for name, higher in (("attn_v", attn_v), (down, ffn_down)):
            kinds = [kind for kind, layers in higher.items() if layer in layers]
            expected[f"blk.{layer}.{name}"] = kinds[0] if kinds else base
    return expected


def without_norms(types):
    return {name: kind for name, kind in types.items() if "norm" not in name}


@pytest.mark.parametrize("outtype", MIXTURES_OF_32)
@pytest.mark.parametrize("hidden_act", ["silu", "relu"])
def test_mixtures(types_of, outtype, hidden_act):
    """ffn_down_t follows ffn_down; K types are never for upstream."""
    shape = K_SHAPE | {"num_hidden_layers": 32, "hidden_act": hidden_act, "intermediate_size": 1024}
    types, err = types_of(shape, outtype)
    base, *rest = MIXTURES_OF_32[outtype]
    down = "ffn_down_t" if hidden_act == "relu" else "ffn_down"
    expected = expected_types(32, base, *rest, down=down)
    expected |= {"token_embd": base, "output": "Q6_K"}
    assert without_norms(types) == expected
    assert "another type" not in err
    if hidden_act == "relu":
        assert "extended dialect" in err


def test_mixture_of_few_layers_and_tied_embeddings(types_of):
    shape = K_SHAPE | {"num_hidden_layers": 10, "tie_word_embeddings": True}
    types, _ = types_of(shape, "q4_k_m")
    expected = expected_types(10, "Q4_K", {"Q6_K": MORE_OF_10}, {"Q6_K": MORE_OF_10}, "Q4_K")
    assert without_norms(types) == expected | {"token_embd": "Q6_K"}


def test_q2_k_keeps_more_where_four_heads_share_values(types_of):
    shape = K_SHAPE | {"num_attention_heads": 4}
    types, _ = types_of(shape, "q2_k")
    assert types["blk.0.attn_v"] == "Q4_K"


@pytest.mark.parametrize(("outtype", "attn_v"), [("q4_k_m", "Q5_K"), ("q3_k_m", "Q5_K")])
def test_attn_v_of_70b(types_of, outtype, attn_v):
    types, _ = types_of(K_SHAPE | {"num_hidden_layers": 80}, outtype)
    assert types["blk.11.attn_v"] == attn_v
    assert types["blk.11.attn_q"] == outtype[:4].upper()


@pytest.mark.parametrize("outtype", ["q4_1", "q5_0", "q5_1", "iq4_nl", "q3_k", "q4_k", "q5_k"])
def test_uniform_types(types_of, outtype):
    types, _ = types_of(K_SHAPE, outtype)
    kind = outtype.upper()
    expected = expected_types(2, kind, {}, {}, kind) | {"token_embd": "Q8_0", "output": "Q8_0"}
    assert without_norms(types) == expected


@pytest.mark.parametrize(
    ("outtype", "base", "higher", "output"),
    [
        ("q4_k_m", "Q5_0", "Q8_0", "Q8_0"),
        ("q4_k_s", "Q5_0", "Q5_1", "Q8_0"),
        ("q5_k_m", "Q5_1", "Q8_0", "Q8_0"),
        ("q6_k", "Q8_0", "Q8_0", "Q8_0"),
        ("q3_k_m", "Q4_0", "Q5_1", "Q8_0"),
        ("q2_k", "Q4_0", "Q4_0", "Q8_0"),
        ("q4_k", "Q5_0", "Q5_0", "Q8_0"),
    ],
)
def test_fallback_to_blocks_of_32(types_of, outtype, base, higher, output):
    """Rows of 288: what llama.cpp takes instead, said on stderr and counted."""
    shape = {"hidden_size": 288, "intermediate_size": 512, "num_attention_heads": 6}
    shape |= {"num_key_value_heads": 2}
    types, err = types_of(shape, outtype)
    assert types["blk.0.attn_q"] == base
    assert types["blk.1.attn_v"] == higher
    assert types["output"] == output
    kept = types["blk.0.ffn_down"]  # its rows are 512 long
    assert kept.endswith("_K")
    n_fallen = sum(not kind.endswith("_K") and kind != "F32" for kind in types.values())
    fallen = (
        14 if outtype not in ("q4_k",) else 12
    )  # all but two ffn_down; q4_k asks for Q8_0 twice
    assert n_fallen == 14
    assert f"warning: {fallen} matrices have rows that are no multiple of 256" in err
    assert f"({fallen} of them another type than asked for)" in err


def test_fallback_to_f16(types_of):
    """Rows of 72 are no whole blocks of 32 either."""
    types, err = types_of({"hidden_size": 72, "intermediate_size": 512}, "q4_k_m")
    assert types["blk.0.attn_q"] == "F16"
    assert "Q4_K -> F16" in err


def test_each_fallback_is_listed_with_v(types_of):
    _, err = types_of({}, "q4_k_m", "-v")
    assert "blk.0.attn_q.weight: rows of 64, Q5_0" in err
    _, err = types_of({}, "q4_k_m", "-q")
    assert err.startswith("warning: ")  # not even -q hides it
    assert len(err.splitlines()) == 1


def test_names_of_the_command():
    assert tuple(OutType) == OUTTYPES


@pytest.mark.parametrize("outtype", OutType)
def test_files(checkpoint, converted, outtype):
    """gguf-py opens every kind of file and finds the values that its own dequantisers give for our bits."""
    source = checkpoint(K_SHAPE)
    file: GgufFile = converted(source, outtype=outtype)
    if outtype in FILE_TYPES:
        assert file.key("general.file_type") == FILE_TYPES[outtype]
    want = source.tensors["model.layers.1.mlp.gate_proj.weight"]
    got = file.tensor("blk.1.ffn_gate.weight")
    kind = file.type_of("blk.1.ffn_gate.weight")
    assert kind.name in (outtype.upper(), outtype.upper()[:4])
    # relative error of normal numbers: about step / sqrt(12) of 2 bits at worst, see test_types for bounds
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.35
    n_elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert file._tensors["blk.1.ffn_gate.weight"].n_bytes == want.size // n_elements * n_bytes
