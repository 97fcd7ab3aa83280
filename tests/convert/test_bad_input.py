"""Hostile files: one error line, one hint, the right exit code, nothing left (about 10 s).

What checkpoints, counts and predictors can get wrong stands in test_refusals, test_checkpoint, test_activations.
"""

import json
import pickle
import random
import struct

import numpy as np
import pytest

from powerinfer_toolkit.convert.cli import main
from powerinfer_toolkit.convert.gguf_file import GgufFile

RELU = {"hidden_act": "relu", "intermediate_size": 1024}


def header_bytes(path):
    file = GgufFile(path)
    return min(file._begins.values())


@pytest.mark.parametrize("step", [1, 64])
def test_model_files_cut_short(model, refused, tmp_path, step):
    """Everywhere in the last 100 bytes, and at every 64 bytes of the file."""
    whole, cut = model.read_bytes(), tmp_path / "cut.gguf"
    ends = range(len(whole) - 100, len(whole)) if step == 1 else range(0, len(whole) - 100, 64)
    n_padding = len(whole) - len(whole.rstrip(b"\0"))
    for size in ends if step == 1 else random.Random(1).sample(ends, 150):
        if size >= len(whole) - n_padding:
            continue
        cut.write_bytes(whole[:size])
        err = refused(cut, tmp_path / "out.gguf")
        assert "cut.gguf" in err


def test_model_files_with_changed_bytes(model, tmp_path):
    """1,500 changes of header bytes: converted, or refused with PiError; never another exception."""
    whole, path = model.read_bytes(), tmp_path / "changed.gguf"
    rng, n_header, refusals = random.Random(2), header_bytes(model), 0
    path.write_bytes(whole)
    with path.open("r+b", buffering=0) as stream:
        for _ in range(1500):
            at = rng.randrange(n_header)
            stream.seek(at)
            stream.write(bytes([whole[at] ^ rng.choice((1, 0x80, 0xFF, 0x20))]))
            code = main([str(path), str(tmp_path / "out.gguf"), "-q", "--dry-run"])
            assert code in (0, 1)
            refusals += code
            stream.seek(at)
            stream.write(whole[at : at + 1])
    assert refusals > 100


@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, b"GGML", "neither a directory nor a GGUF file"),
        (4, struct.pack("<I", 1), "version 1"),
        (4, struct.pack(">I", 3), "version 50331648"),
        (8, struct.pack("<Q", 1 << 60), "damaged in its header"),
        (16, struct.pack("<Q", 1 << 60), "damaged in its header"),
        (24, struct.pack("<Q", 1 << 62), "a name of 4611686018427387904 bytes"),
    ],
)
def test_headers(model, refused, tmp_path, at, value, said):
    data = bytearray(model.read_bytes())
    data[at : at + len(value)] = value
    model.write_bytes(data)
    assert said in refused(model, tmp_path / "out.gguf")


def replaced(path, old, new):
    data = path.read_bytes()
    assert old in data
    assert len(old) == len(new)
    path.write_bytes(data.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"general.architecture", b"general.archifecture", "architecture None is not supported"),
        (b"llama.block_count", b"llama.block_cownt", "lacks block_count"),
        (b"blk.0.ffn_up.weight", b"blk.0.ffn_xp.weight", "the source lacks blk.0.ffn_up.weight"),
        (b"blk.0.ffn_up.weight", b"blk.0.attn_q.weight", "stands there twice"),
        (b"blk.0.fc2.weight", b"blk.0.fc3.weight", "does not use: blk.0.fc3.weight"),
    ],
)
def test_keys_and_tensors_that_are_missing(model, refused, tmp_path, old, new, said):
    replaced(model, old, new)
    assert said in refused(model, tmp_path / "out.gguf")


def test_a_sparse_file_that_does_not_say_its_activation(model, refused, pi_convert, tmp_path):
    """Guessing would run a model silently wrong."""
    name = struct.pack("<Q", 21) + b"powerinfer.activation"
    replaced(model, name, name[:-1] + b"X")
    assert "no key powerinfer.activation" in refused(model, tmp_path / "out.gguf")
    assert pi_convert(model, tmp_path / "out.gguf", "--hidden-act", "relu")[0] == 0


def test_values_that_do_not_fit(checkpoint, refused, pi_convert, tmp_path):
    plain = tmp_path / "plain.gguf"
    assert pi_convert(checkpoint(RELU).path, plain)[0] == 0
    whole = plain.read_bytes()
    at = whole.index(b"llama.attention.head_count_kv") + len(b"llama.attention.head_count_kv") + 4
    for value, said in ((3, "cannot share"), (0, "head_count_kv is 0"), (4, "has shape")):
        plain.write_bytes(whole[:at] + struct.pack("<I", value) + whole[at + 4 :])
        assert said in refused(plain, tmp_path / "out.gguf")
    name = b"powerinfer.format_version"
    at = whole.index(name) + len(name) + 4
    plain.write_bytes(whole[:at] + struct.pack("<I", 2) + whole[at + 4 :])
    assert "format version 2" in refused(plain, tmp_path / "out.gguf")


def test_unknown_tensor_types_are_named(model, refused, tmp_path):
    whole, name = model.read_bytes(), b"blk.0.ffn_up.weight"
    at = whole.index(name) + len(name) + 4 + 16
    for number, said in ((16, "IQ2_XXS"), (26, "I32"), (9999, "9999")):
        model.write_bytes(whole[:at] + struct.pack("<I", number) + whole[at + 4 :])
        assert f"unsupported type {said}" in refused(model, tmp_path / "out.gguf")


def test_options_for_the_other_kind_of_source(checkpoint, model, refused, tmp_path):
    source, output = checkpoint(RELU).path, tmp_path / "out.gguf"
    for option in (("--no-predictors",), ("--hidden-act", "relu")):
        assert "is for GGUF sources" in refused(source, output, *option, code=2)
    both = ("--no-predictors", "--predictors", tmp_path)
    assert "exclude each other" in refused(model, output, *both, code=2)
    assert "needs --activations" in refused(model, output, "--neuron-order", "hot-first", code=2)


@pytest.mark.parametrize("sha256", ["ab" * 32, "right"])
def test_predictors_of_other_weights(
    checkpoint, refused, pi_convert, predictor_dir, tmp_path, sha256
):
    """The same shapes, another model: config.json names the weights they were trained for."""
    source = checkpoint(RELU)
    folder, first, output = predictor_dir(source), tmp_path / "first.gguf", tmp_path / "out.gguf"
    assert pi_convert(source.path, first)[0] == 0
    if sha256 == "right":
        sha256 = GgufFile(first).value("powerinfer.source.sha256")
    (folder / "config.json").write_text(json.dumps({"source_sha256": sha256}))
    for path in (source.path, first):
        command = path, output, "--predictors", folder, "--force"
        if sha256.startswith("abab"):
            assert "predictors belong to weights ababab" in refused(*command)
        else:
            assert pi_convert(*command)[0] == 0
            output.unlink()


@pytest.mark.parametrize("what", ["empty directory", "empty file", "pickled code", "file"])
def test_predictor_places(checkpoint, refused, predictor_dir, tmp_path, what):
    source = checkpoint(RELU)
    folder = predictor_dir(source)
    if what == "empty directory":
        for path in folder.iterdir():
            path.unlink()
    elif what == "empty file":
        (folder / "model_0.safetensors").write_bytes(b"")
    elif what == "pickled code":
        pytest.importorskip("torch")
        for path in folder.iterdir():
            path.unlink()
        marker = tmp_path / "marker"
        code = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
        for layer in (0, 1):
            (folder / f"model_{layer}.pt").write_bytes(code)
        assert pickle.dumps(0)  # the module is there, and nobody called it on that
    else:
        folder = folder / "model_0.safetensors"
    err = refused(source.path, tmp_path / "out.gguf", "--predictors", folder)
    assert not (tmp_path / "marker").exists()
    said = {"empty directory": "lacks model_0 (2 of 2", "empty file": "model_0.safetensors"}
    said |= {"pickled code": "model_0.pt", "file": "is not a directory"}
    assert said[what] in err


def test_counts_that_claim_more_than_they_hold(checkpoint, refused, tmp_path):
    """No memory is set aside for what a header claims."""
    path = tmp_path / "counts.npy"
    np.save(path, np.ones((2, 1024)))
    whole = path.read_bytes()
    claims = tmp_path / "claims.npy"
    claims.write_bytes(whole.replace(b"(2, 1024), }" + b" " * 12, b"(2000000000000, 1024), }"))
    damaged = tmp_path / "damaged.npy"
    damaged.write_bytes(whole.replace(b"(2, 1024), }", b"(2, 1024(((}"))
    archive = tmp_path / "zip.npy"
    np.savez(archive, np.ones(3))
    (tmp_path / "zip.npy.npz").rename(archive)
    source = checkpoint(RELU).path
    for counts in (claims, damaged, archive):
        assert counts.read_bytes() != whole
        refused(source, tmp_path / "out.gguf", "--activations", counts)


def test_safetensors_headers(checkpoint, refused, tmp_path):
    source = checkpoint(RELU)
    path = source.path / "model.safetensors"
    for text in (
        b"[" * 100_000,
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]}}',
        b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        b'{"__metadata__": 3}',
        b'{"a": 3}',
    ):
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
        assert "model.safetensors" in refused(source.path, tmp_path / "out.gguf")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_deeply_nested_json(checkpoint, refused, tmp_path, name):
    source = checkpoint()
    (source.path / name).write_text("[" * 100_000)
    assert name.split(".")[0] in refused(source.path, tmp_path / "out.gguf")


def test_no_tokenizer(checkpoint, refused, tmp_path):
    source = checkpoint()
    (source.path / "tokenizer.json").unlink()
    assert "no tokenizer in" in refused(source.path, tmp_path / "out.gguf")


def test_unknown_vocabulary(checkpoint, refused, tmp_path):
    source = checkpoint()
    path = source.path / "tokenizer.json"
    spec = json.loads(path.read_text())
    spec["model"] = {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}
    spec["added_tokens"] = []
    path.write_text(json.dumps(spec))
    assert "WordLevel" in refused(source.path, tmp_path / "out.gguf")


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m"])
def test_allow_nonfinite(checkpoint, pi_convert, rewrite, tmp_path, outtype):
    """Kept where a type can hold them, else 0; either way it is said, and comes back out the same."""
    import gguf as gguf_py

    source = checkpoint({"hidden_size": 256})
    name = "model.layers.1.mlp.up_proj.weight"
    for index, value in (((3, 5), np.nan), ((4, 6), np.inf), ((4, 7), -np.inf)):
        rewrite(source, name, index, value)
    output = tmp_path / "out.gguf"
    command = source.path, output, "--outtype", outtype
    assert pi_convert(*command)[0] == 1
    code, _, err = pi_convert(*command, "--allow-nonfinite")
    assert code == 0
    assert "warning: 3 weights in 1 tensors are NaN or infinite, the first in blk.1.ffn_up" in err
    raw = GgufFile(output).read("blk.1.ffn_up.weight")
    kind = gguf_py.GGMLQuantizationType[raw.dtype]
    data = raw.data.view(np.uint8) if raw.dtype == "BF16" else raw.data
    values = gguf_py.quants.dequantize(data, kind)
    want = source.tensors[name]
    if outtype in ("f32", "f16", "bf16"):
        np.testing.assert_array_equal(np.isfinite(values), np.isfinite(want))
        again = tmp_path / "again.gguf"
        assert pi_convert(output, again)[0] == 1
        assert pi_convert(output, again, "--allow-nonfinite")[0] == 0
        assert GgufFile(again).read("blk.1.ffn_up.weight").data.tobytes() == raw.data.tobytes()
    else:
        assert np.isfinite(values).all()
        # the rest of the block is as good as ever: half a step of 4 bits over a range of at most 1
        rest = np.isfinite(want)
        assert np.abs(values - np.where(rest, want, 0))[rest].max() < 0.1
