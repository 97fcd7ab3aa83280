"""Reading checkpoints: every layout gives the same file, and damage is named (about 3 s)."""

import json
import os
import random

import numpy as np
import pytest

from powerinfer_toolkit.convert.checkpoint import Checkpoint
from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.safetensors_file import SafetensorsFile
from powerinfer_toolkit.convert.settings import ConvertSettings
from powerinfer_toolkit.errors import PiError


def shard(source, write_tensors, n_shards=3):
    """Split model.safetensors of a checkpoint into shards with an index."""
    (source.path / "model.safetensors").unlink()
    names = list(source.tensors)
    weight_map = {}
    for i in range(n_shards):
        part = {name: source.tensors[name] for name in names[i::n_shards]}
        file_name = f"model-{i + 1:05}-of-{n_shards:05}.safetensors"
        write_tensors(source.path / file_name, part)
        weight_map |= dict.fromkeys(part, file_name)
    index = source.path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def convert_bytes(source, tmp_path, **settings):
    output = tmp_path / "out.gguf"
    prepare(ConvertSettings(str(source.path), output, force=True, **settings)).write()
    return output.read_bytes()


def test_sharded_equals_single(checkpoint, write_tensors, tmp_path):
    source = checkpoint()
    single = convert_bytes(source, tmp_path)
    shard(source, write_tensors)
    assert convert_bytes(source, tmp_path) == single


def test_torch_files_equal_safetensors(checkpoint, tmp_path):
    torch = pytest.importorskip("torch")
    source = checkpoint(dtype="BF16")
    single = convert_bytes(source, tmp_path)
    (source.path / "model.safetensors").unlink()
    tensors = {name: torch.from_numpy(t).bfloat16() for name, t in source.tensors.items()}
    torch.save(tensors, source.path / "pytorch_model.bin")
    assert convert_bytes(source, tmp_path) == single  # source.sha256 among the keys is the same too

    (source.path / "pytorch_model.bin").unlink()
    weight_map = {}
    for i in range(2):
        part = dict(list(tensors.items())[i::2])
        torch.save(part, source.path / f"pytorch_model-{i + 1:05}-of-00002.bin")
        weight_map |= dict.fromkeys(part, f"pytorch_model-{i + 1:05}-of-00002.bin")
    index = source.path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert convert_bytes(source, tmp_path) == single


def test_torch_tensors_that_are_views(checkpoint, tmp_path):
    torch = pytest.importorskip("torch")
    source = checkpoint()
    single = convert_bytes(source, tmp_path)
    (source.path / "model.safetensors").unlink()
    columns_first = {
        name: torch.from_numpy(np.asfortranarray(t)) for name, t in source.tensors.items()
    }
    torch.save(columns_first, source.path / "pytorch_model.bin")
    assert convert_bytes(source, tmp_path) == single


@pytest.mark.parametrize("how", ["pickle", "legacy", "cut", "list"])
def test_torch_files_that_are_refused(checkpoint, how):
    torch = pytest.importorskip("torch")
    source = checkpoint()
    (source.path / "model.safetensors").unlink()
    path = source.path / "pytorch_model.bin"
    tensors = {name: torch.from_numpy(t) for name, t in source.tensors.items()}
    if how == "pickle":
        torch.save(tensors | {"run me": os.system}, path)
    elif how == "legacy":
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
    elif how == "list":
        torch.save(list(tensors.values()), path)
    else:
        torch.save(tensors, path)
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(PiError, match=r"pytorch_model\.bin"):
        Checkpoint(source.path)


def test_hash_is_of_the_weights_alone(checkpoint, converted, write_tensors):
    source = checkpoint()
    key = "powerinfer.source.sha256"
    first = converted(source).key(key)
    assert len(first) == 64
    assert set(first) <= set("0123456789abcdef")
    reordered = dict(reversed(source.tensors.items()))
    write_tensors(source.path / "model.safetensors", reordered)
    assert converted(source, force=True).key(key) == first
    source.tensors["model.norm.weight"][0] += 1
    write_tensors(source.path / "model.safetensors", source.tensors)
    assert converted(source, force=True).key(key) != first


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_what_is_left_out_knowingly(checkpoint, write_tensors, tmp_path, name):
    source = checkpoint({"tie_word_embeddings": True})
    plain = convert_bytes(source, tmp_path)
    more = source.tensors | {name: np.ones((300, 64), np.float32)}
    write_tensors(source.path / "model.safetensors", more)
    assert convert_bytes(source, tmp_path) == plain


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.gate_proj.bias", "model.layers.2.mlp.gate_proj.weight", "score"]
)
def test_what_would_be_lost_is_refused(checkpoint, write_tensors, tmp_path, name):
    source = checkpoint()
    write_tensors(source.path / "model.safetensors", source.tensors | {name: np.ones(4)})
    with pytest.raises(PiError, match=f"does not use: {name}"):
        convert_bytes(source, tmp_path)


def test_missing_and_cut_shards(checkpoint, write_tensors):
    source = checkpoint()
    index = shard(source, write_tensors)
    second = source.path / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        second.write_bytes(whole[:size])
        with pytest.raises(PiError, match="model-00002-of-00003"):
            Checkpoint(source.path)
    second.unlink()
    with pytest.raises(PiError, match=r"lacks model-00002-of-00003\.safetensors"):
        Checkpoint(source.path)
    second.write_bytes((source.path / "model-00001-of-00003.safetensors").read_bytes())
    with pytest.raises(PiError, match="which the index puts there"):
        Checkpoint(source.path)
    index.write_text('{"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}')
    with pytest.raises(PiError, match="outside its own directory"):
        Checkpoint(source.path)
    for text in ("{}", "[1]", "x", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(PiError, match="no index of weight files"):
            Checkpoint(source.path)
    index.unlink()
    with pytest.raises(PiError, match="holds no weights"):
        Checkpoint(source.path)


def test_a_file_cut_between_header_and_read(checkpoint):
    source = checkpoint()
    path = source.path / "model.safetensors"
    opened = Checkpoint(source.path)
    path.write_bytes(path.read_bytes()[:-10])
    last = list(source.tensors)[-1]
    with pytest.raises(PiError, match=f"cut short while {last}"):
        opened.read(last)


def test_quantised_weights_are_refused(checkpoint, write_tensors, tmp_path):
    source = checkpoint()
    write_tensors(source.path / "model.safetensors", source.tensors, "I64")
    with pytest.raises(PiError, match="has the type I64"):
        convert_bytes(source, tmp_path)


def test_damaged_headers_are_errors(checkpoint, tmp_path):
    """2000 files with changed header bytes: parsed or refused, never another exception."""
    source = checkpoint({"num_hidden_layers": 1})
    whole = (source.path / "model.safetensors").read_bytes()
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(5)
    path = tmp_path / "damaged.safetensors"
    refused = 0
    for _ in range(2000):
        damaged = bytearray(whole[: header_bytes + 64])
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(header_bytes)] = rng.choice(b'0129{}[]",:-x\x00\xff')
        path.write_bytes(damaged + bytes(len(whole) - len(damaged)))
        try:
            file = SafetensorsFile(path)
            for name in file.entries:
                file.read(name)
        except PiError:
            refused += 1
    assert refused > 1000
