"""Importance matrices: both formats as libgguf reads them, the bits that llama.cpp makes with them (about 4 s)."""

import struct

import gguf
import numpy as np
import pytest

from parity.gguf_file import GgufFile
from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.importance import read_importance
from powerinfer_toolkit.convert.outtypes import OutType
from powerinfer_toolkit.convert.settings import ConvertSettings

SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
MATRICES = {"attn_q": 256, "attn_k": 256, "attn_v": 256, "attn_output": 256}
MATRICES |= {"ffn_gate": 256, "ffn_up": 256, "ffn_down": 512}


def means(n_layers=2):
    """Tensor name -> mean squared inputs."""
    rng = np.random.default_rng(8)
    return {
        f"blk.{layer}.{name}.weight": rng.exponential(size=size).astype(np.float32)
        for layer in range(n_layers)
        for name, size in MATRICES.items()
    }


def write_gguf_matrix(path, entries, count=64.0):
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["some text"])
    writer.add_uint32("imatrix.chunk_count", 5)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, values in entries.items():
        writer.add_tensor(name + ".in_sum2", (values * np.float32(count)).reshape(1, -1))
        writer.add_tensor(name + ".counts", np.full((1, 1), count, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_binary_matrix(path, entries, n_calls=64):
    parts = [struct.pack("<i", len(entries))]
    for name, values in entries.items():
        parts.append(struct.pack("<i", len(name)) + name.encode())
        parts.append(struct.pack("<ii", n_calls, len(values)))
        parts.append((values * np.float32(n_calls)).tobytes())
    parts.append(struct.pack("<i", 5) + struct.pack("<i", 9) + b"some text")
    path.write_bytes(b"".join(parts))
    return path


WRITERS = {"imatrix.gguf": write_gguf_matrix, "imatrix.dat": write_binary_matrix}


@pytest.mark.parametrize("name", WRITERS)
def test_both_formats(tmp_path, name):
    libgguf = pytest.importorskip("libgguf")
    path = WRITERS[name](tmp_path / name, means())
    want, got = libgguf.load_imatrix(path), read_importance(path).entries
    assert want.keys() == got.keys()
    for tensor, values in want.items():
        np.testing.assert_array_equal(got[tensor], values)


def test_columns_that_were_never_seen_count_alike(tmp_path):
    path = write_gguf_matrix(tmp_path / "imatrix.gguf", means(), count=0.0)
    assert all((values == 1).all() for values in read_importance(path).entries.values())


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("outtype", ["q4_k_m", "q4_0", "iq4_nl", "q2_k"])
def test_weights_reach_the_quantiser(checkpoint, converted, tmp_path, outtype, name):
    """Every block is what llama.cpp's quantiser makes of the same rows and weights."""
    pytest.importorskip("xllamacpp")
    from parity.ggml import Ggml

    ggml, source, entries = Ggml(), checkpoint(SHAPE), means()
    matrix = WRITERS[name](tmp_path / name, entries)
    floats = converted(source, outtype="f32", output=tmp_path / "f32.gguf")
    file = converted(source, outtype=outtype, imatrix=matrix)
    for tensor, weights in entries.items():
        rows = floats.tensor(tensor).astype(np.float32)
        want = ggml.quantise(rows, file.type_of(tensor), weights)
        assert file._tensors[tensor].data.tobytes() == want.tobytes(), tensor
    origins = file.key("powerinfer.manifest")
    assert f'"imatrix": {{"name": "{name}"' in origins


def test_columns_follow_the_neurons(checkpoint, converted, counts_file, tmp_path):
    """Weights are numbered as the source's neurons; a dense ffn_down has them as columns."""
    pytest.importorskip("xllamacpp")
    from parity.ggml import Ggml

    ggml, source, entries = Ggml(), checkpoint(SHAPE), means()
    matrix, counts = write_gguf_matrix(tmp_path / "imatrix.gguf", entries), counts_file(source)
    file = converted(source, outtype="q4_k", imatrix=matrix, activations=counts)
    for layer in (0, 1):
        order = np.argsort(-np.load(counts)[layer], kind="stable")
        name = f"blk.{layer}.ffn_down.weight"
        down = source.tensors[f"model.layers.{layer}.mlp.down_proj.weight"][:, order]
        want = ggml.quantise(down, file.type_of(name), entries[name][order])
        assert file._tensors[name].data.tobytes() == want.tobytes()


def test_a_transposed_down_has_no_use_for_it(checkpoint, converted, tmp_path):
    """There a neuron is a row, and one weight for a whole row changes nothing."""
    source = checkpoint(SHAPE | {"hidden_act": "relu", "intermediate_size": 1280})
    entries = means()
    with_down = {k: v for k, v in entries.items() if "ffn_down" not in k}
    down = np.ones(1280, np.float32)
    with_down |= {f"blk.{layer}.ffn_down.weight": down for layer in (0, 1)}
    without_down = {k: v for k, v in with_down.items() if "ffn_down" not in k}
    plain = converted(source, outtype="q4_k", output=tmp_path / "plain.gguf")
    files = [
        converted(
            source,
            outtype="q4_k",
            imatrix=write_gguf_matrix(tmp_path / f"{i}.dat", matrix),
            output=tmp_path / f"{i}.gguf",
        )
        for i, matrix in enumerate((with_down, without_down))
    ]
    for name, tensor in files[0]._tensors.items():
        assert tensor.data.tobytes() == files[1]._tensors[name].data.tobytes()
        same = tensor.data.tobytes() == plain._tensors[name].data.tobytes()
        assert same == (name not in without_down)


def test_requantising_with_importance(checkpoint, converted, tmp_path):
    source = checkpoint(SHAPE)
    matrix = write_gguf_matrix(tmp_path / "imatrix.gguf", means())
    want = converted(source, outtype="q4_k_m", imatrix=matrix)
    floats = tmp_path / "f32.gguf"
    converted(source, outtype="f32", output=floats)
    output = tmp_path / "q.gguf"
    settings = ConvertSettings(str(floats), output, OutType.Q4_K_M, imatrix=matrix)
    prepare(settings).write()
    got = GgufFile(output)
    assert all(t.data.tobytes() == got._tensors[n].data.tobytes() for n, t in want._tensors.items())


def broken(how):
    entries = means()
    gate = "blk.1.ffn_gate.weight"
    if how == "missing":
        del entries[gate]
    elif how == "short":
        entries[gate] = entries[gate][:-1]
    elif how == "unknown":
        entries["blk.2.ffn_gate.weight"] = entries[gate]
    elif how == "negative":
        entries[gate][3] = -1
    elif how == "nan":
        entries[gate][3] = np.nan
    elif how == "zero":
        entries[gate][:] = 0
    return entries


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "says nothing of blk.1.ffn_gate.weight"),
        ("short", "blk.1.ffn_gate.weight has 255 columns; this model's has 256"),
        ("unknown", "has weights for blk.2.ffn_gate.weight, which this model lacks"),
        ("negative", "negative, not finite or all zero"),
        ("nan", "negative, not finite or all zero"),
        ("zero", "negative, not finite or all zero"),
    ],
)
def test_matrices_that_are_refused(checkpoint, pi_convert, tmp_path, how, said, name):
    path = WRITERS[name](tmp_path / name, broken(how))
    command = checkpoint(SHAPE).path, tmp_path / "out.gguf", "--outtype", "q4_k_m"
    code, _, err = pi_convert(*command, "--imatrix", path)
    assert code == 1
    assert said in err
    assert "hint: " in err
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", WRITERS)
def test_cut_anywhere_it_is_refused(tmp_path, name):
    from powerinfer_toolkit.errors import PiError

    whole = WRITERS[name](tmp_path / name, means(1)).read_bytes()
    path = tmp_path / "cut"
    end = len(whole) - 17  # what follows the entries of the binary format is not needed
    for size in [*range(0, 300), *range(300, end, 997)]:
        path.write_bytes(whole[:size])
        with pytest.raises(PiError):
            read_importance(path)


def test_where_it_makes_no_sense(checkpoint, pi_convert, tmp_path):
    path = write_gguf_matrix(tmp_path / "imatrix.gguf", means())
    command = checkpoint(SHAPE).path, tmp_path / "out.gguf", "--imatrix", path
    code, _, err = pi_convert(*command, "--outtype", "q8_0")
    assert code == 2
    assert "no matrix of this output takes an importance matrix" in err
    assert pi_convert(*command[:2], "--outtype", "f16")[0] == 0
    code, _, err = pi_convert(command[1], tmp_path / "x.gguf", "--imatrix", path)
    assert code == 2
    assert "--imatrix needs --outtype" in err
    code, _, err = pi_convert(*command[:2], "--force", "--imatrix", tmp_path / "gone")
    assert code == 1
    assert "gone" in err
