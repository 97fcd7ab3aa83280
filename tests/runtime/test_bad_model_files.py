"""Files that are no model, or not the one they claim to be: one error, one hint, exit code 1."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from parity.synthetic import Shape, Weights, dense_layout, random_weights, uniform, write_gguf
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime import Model, bench, cli
from refusals import assert_refused, run_command

SHAPE = Shape(ranks=(8, 12, 8), n_layers=3)
RELU = {"powerinfer.activation": "relu"}
Damage = Callable[[Path], object]


@pytest.fixture
def refused(capsys):
    """Checks that pi-run refuses a file, and that Model.load says the same."""

    def check(path: Path, says: str) -> None:
        said = run_command(cli.main, capsys, "-m", path, "-p", "w1")
        assert_refused(said, 1, says)
        with pytest.raises(PiError) as failure:
            Model.load(path)
        assert said.err.splitlines()[-2] == f"error: {failure.value.message}"

    return check


# ---- what is no model ------------------------------------------------------------------------------------


def written(data: bytes) -> Damage:
    return lambda path: path.write_bytes(data)


NO_MODELS: dict[str, tuple[Damage, str]] = {
    "missing": (lambda path: None, "No such file"),
    "directory": (Path.mkdir, "is a directory"),
    "empty": (written(b""), "is empty"),
    "fifo": (os.mkfifo, "not a regular file"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "No such file"),
    "circle of links": (lambda path: path.symlink_to(path), "symbolic links"),
    "text": (written(b"hello, I am a model\n"), "no GGUF file"),
    "zeros": (written(bytes(4096)), "no GGUF file"),
    "pickle": (written(b"PK\x03\x04" + bytes(100)), "no GGUF file"),
    "three bytes": (written(b"GGU"), "truncated"),
    "magic": (written(b"GGUF"), "truncated"),
    "upstream's magic": (written(b"PWRI\x03\0\0\0"), "truncated"),
    "version 1": (written(b"GGUF" + struct.pack("<IQQ", 1, 0, 0)), "version 1 is not supported"),
    "big endian": (written(b"GGUF" + struct.pack(">IQQ", 3, 0, 0)), "big-endian"),
    "no keys": (written(b"GGUF" + struct.pack("<IQQ", 3, 0, 0)), "general.architecture is missing"),
    "many keys": (written(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63)), "truncated"),
    "many tensors": (written(b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0)), "truncated"),
}


@pytest.mark.parametrize("what", NO_MODELS)
def test_what_is_no_model(what, refused, tmp_path):
    make, says = NO_MODELS[what]
    make(tmp_path / "model.gguf")
    refused(tmp_path / "model.gguf", says)


def test_a_name_that_is_too_long(refused, tmp_path):
    refused(tmp_path / ("x" * 300), "too long")


@contextmanager
def nobody() -> Iterator[None]:
    """Root may read everything, so the test becomes someone who may not."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield


def test_an_unreadable_file(synthetic_gguf, refused, tmp_path):
    path = shutil.copy(synthetic_gguf("dense"), tmp_path / "model.gguf")
    Model.load(path).close()  # what is imported late is now there
    os.chmod(path, 0)
    with nobody():
        refused(Path(path), "Permission denied")


@pytest.mark.parametrize(
    "name", ["two words.gguf", "modèle.gguf", "模型.gguf", b"\xff\xfe.gguf", "-m"]
)
def test_any_name_will_do(name, synthetic_gguf, capsys, tmp_path):
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    shutil.copy(synthetic_gguf("dense"), path)
    flags = [f"-m{os.fsdecode(path)}", "-p", "w1", "-n", 4, "--temp", 0]
    assert run_command(cli.main, capsys, *flags).code == 0
    os.truncate(path, 100)
    assert_refused(run_command(cli.main, capsys, *flags), 1, "truncated")


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.99, 1])
@pytest.mark.parametrize("magic", [b"GGUF", b"PWRI"])
def test_truncated_files(share, magic, refused, tmp_path):
    path = sparse(tmp_path, magic=magic)
    os.truncate(path, int(path.stat().st_size * share) - 1)
    refused(path, "truncated")


def test_pi_bench_refuses_alike(capsys, tmp_path):
    (tmp_path / "text").write_text("hello, I am a model")
    for path, says in ((tmp_path / "no", "No such file"), (tmp_path / "text", "no GGUF file")):
        assert_refused(run_command(bench.main, capsys, "-m", path, "-p", 8), 1, says)


# ---- models that are not whole ----------------------------------------------------------------------------


def sparse(folder: Path, change: Callable[[Weights], object] | None = None, **options) -> Path:
    """A ReLU model with predictors, its weights changed before they are written."""
    weights = random_weights(SHAPE, 0)
    if change is not None:
        change(weights)
    keys = RELU | options.pop("keys", {})
    return write_gguf(folder / "model.gguf", SHAPE, weights, keys=keys, **options)


def dense(folder: Path, change: Callable[[Weights], object] | None = None, **options) -> Path:
    shape = Shape()
    weights = dense_layout(random_weights(shape, 0))
    if change is not None:
        change(weights)
    return write_gguf(folder / "model.gguf", shape, weights, **options)


def without(name: str) -> Callable[[Weights], object]:
    return lambda weights: weights.pop(name)


def reshaped(name: str, rows: int, columns: int) -> Callable[[Weights], object]:
    def change(weights: Weights) -> None:
        weights[name] = np.zeros((rows, columns), dtype=np.float32)

    return change


def added(name: str, *shape: int) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: np.zeros(shape, dtype=np.float32)})


INCOMPLETE: dict[str, tuple[Callable[[Weights], object], str]] = {
    # upstream loads these, or finds out while it runs
    "fc1 of the first layer": (without("blk.0.fc1.weight"), "blk.0.fc1.weight is missing"),
    "fc2 of the second layer": (without("blk.1.fc2.weight"), "blk.1.fc2.weight is missing"),
    "fc1 of the last layer": (without("blk.2.fc1.weight"), "blk.2.fc1.weight is missing"),
    "fc2 with too few rows": (reshaped("blk.1.fc2.weight", 159, 12), "blk.1.fc2.weight has shape"),
    "fc2 with too many rows": (reshaped("blk.1.fc2.weight", 161, 12), "blk.1.fc2.weight has shape"),
    "fc2 of another rank": (reshaped("blk.1.fc2.weight", 160, 8), "blk.1.fc2.weight has shape"),
    "fc1 of another model": (reshaped("blk.0.fc1.weight", 8, 64), "blk.0.fc1.weight has shape"),
    "down_t as down": (reshaped("blk.0.ffn_down_t.weight", 96, 160), "ffn_down_t.weight has shape"),
    "gate": (without("blk.2.ffn_gate.weight"), "blk.2.ffn_gate.weight is missing"),
    "attention": (without("blk.0.attn_k.weight"), "blk.0.attn_k.weight is missing"),
    "norm": (without("output_norm.weight"), "output_norm.weight is missing"),
    "embedding": (without("token_embd.weight"), "token_embd.weight is missing"),
    "a row too few": (reshaped("blk.0.attn_q.weight", 95, 96), "attn_q.weight has shape"),
    "a vector as matrix": (reshaped("blk.0.attn_norm.weight", 96, 1), "attn_norm.weight is F32"),
    "a head of other width": (reshaped("output.weight", 293, 95), "output.weight has shape"),
    # a silent difference, were they ignored
    "a bias": (added("blk.0.ffn_up.bias", 160), "no use for tensor blk.0.ffn_up.bias"),
    "a norm of Q": (added("blk.0.attn_q_norm.weight", 16), "no use for tensor"),
    "both layouts": (added("blk.0.ffn_down.weight", 96, 160), "no use for tensor"),
    "a layer too many": (added("blk.3.ffn_norm.weight", 96), "no use for tensor"),
}


@pytest.mark.parametrize("magic", [b"GGUF", b"PWRI"])
@pytest.mark.parametrize("what", INCOMPLETE)
def test_tensors_that_do_not_fit(what, magic, refused, tmp_path):
    change, says = INCOMPLETE[what]
    refused(sparse(tmp_path, change, magic=magic), says)


def test_files_of_the_wrong_kind(refused, tmp_path):
    refused(dense(tmp_path, magic=b"PWRI"), "no ffn_down_t tensors")
    weights = random_weights(SHAPE, 0)
    refused(write_gguf(tmp_path / "m.gguf", SHAPE, weights), "no key powerinfer.activation")


@pytest.mark.parametrize(
    ("type_id", "says"),
    [(16, "type IQ2_XXS"), (26, "type I32"), (34, "type TQ1_0"), (99, "type id 99")],
)
def test_unsupported_types_name_the_supported_ones(type_id, says, capsys, tmp_path):
    path = dense(tmp_path)
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name) + 4 + 2 * 8
    data[at : at + 4] = struct.pack("<I", type_id)
    path.write_bytes(data)
    said = run_command(cli.main, capsys, "-m", path, "-p", "w1")
    assert_refused(said, 1, f"tensor blk.1.ffn_up.weight: {says} is not supported")
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
        assert name in said.err.splitlines()[-1]


def test_rows_that_are_no_whole_blocks(refused, tmp_path):
    path = dense(tmp_path, type_of=uniform(Type.Q8_0))
    data = path.read_bytes()
    shape = struct.pack("<IQQ", 2, 96, 160)
    assert shape in data
    path.write_bytes(data.replace(shape, struct.pack("<IQQ", 2, 95, 160)))
    refused(path, "no whole number of Q8_0 blocks")


# ---- keys -------------------------------------------------------------------------------------------------


def with_value(path: Path, key: str, value: bytes) -> Path:
    """The file with a key's bytes overwritten by as many."""
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<Q", len(key)) + key.encode()) + 8 + len(key) + 4
    data[at : at + len(value)] = value
    path.write_bytes(data)
    return path


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("general.architecture", struct.pack("<Q", 5) + b"mamba", "architecture 'mamba'"),
        ("general.architecture", struct.pack("<Q", 5) + b"\x1b[2Jx", "architecture '?[2Jx'"),
        ("llama.block_count", u32(0), "block_count = 0 is out of range"),
        ("llama.block_count", u32(2**32 - 1), "block_count = 4294967295 is out of range"),
        ("llama.block_count", u32(2**24), "blk.2.attn_norm.weight is missing"),
        ("llama.block_count", u32(1), "no use for tensor"),
        ("llama.embedding_length", u32(2**31), "embedding_length = 2147483648 is out of range"),
        ("llama.embedding_length", u32(128), "has shape"),
        ("llama.feed_forward_length", u32(2**24), "has shape"),
        ("llama.context_length", u32(0), "context_length = 0 is out of range"),
        ("llama.context_length", u32(2**32 - 1), "context_length = 4294967295 is out of range"),
        ("llama.attention.head_count", u32(0), "head_count = 0 is out of range"),
        ("llama.attention.head_count", u32(2**24), "rope.dimension_count"),
        ("llama.attention.head_count", u32(5), "no multiple of attention.head_count_kv"),
        ("llama.attention.head_count_kv", u32(6), "has shape"),
        ("llama.rope.dimension_count", u32(17), "rope.dimension_count"),
        ("llama.rope.dimension_count", u32(18), "rope.dimension_count"),
        ("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", -1), "no positive number"),
        ("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", np.inf), "no positive number"),
        ("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", np.nan), "single-precision"),
    ],
)
def test_keys_out_of_range(key, value, says, refused, tmp_path):
    refused(with_value(dense(tmp_path), key, value), says)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"powerinfer.activation": "gelu"}, "powerinfer.activation is 'gelu'"),
        ({"powerinfer.activation": "x" * 10**5}, "which this version does not know"),
        ({"powerinfer.format_version": 2}, "format version 2"),
        ({"powerinfer.sparse_threshold": "0"}, "sparse_threshold is not a floating-point number"),
        ({"powerinfer.sparse_threshold": float("nan")}, "sparse_threshold"),
        ({"powerinfer.sink_positions": "one"}, "sink_positions is not an integer"),
        ({"powerinfer.predictor.exact_layers": [True]}, "one boolean for each layer"),
        ({"powerinfer.predictor.exact_layers": [1, 1, 1]}, "one boolean for each layer"),
        ({"powerinfer.predictor.kind": 3}, "powerinfer.predictor.kind"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.scaling.factor": 0.0}, "rope.scaling.factor"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale"),
        ({"llama.final_logit_softcapping": 30.0}, "llama.final_logit_softcapping"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale"),
        ({"llama.attention.causal": 0}, "not causal"),
        ({"split.count": 3}, "one of the 3 parts"),
        ({"general.alignment": 48}, "general.alignment is 48"),
    ],
)
def test_keys_that_this_version_cannot_honour(keys, says, refused, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, SHAPE, random_weights(SHAPE, 0), keys={**RELU, **keys})
    refused(path, says)


def test_a_key_that_appears_twice(refused, tmp_path):
    path = dense(tmp_path)
    key = b"llama.block_count"
    path.write_bytes(path.read_bytes().replace(b"llama.rope.freq_base", key, 1))
    data = path.read_bytes().replace(b"llama.context_length", b"llama.attention.xxx_", 1)
    path.write_bytes(data.replace(b"llama.attention.xxx_", b"general.architecture", 1))
    refused(path, "general.architecture appears twice")


def test_scaling_without_a_type_is_linear(tmp_path):
    """Older files state only the factor, under one of two names; ignoring it would be silently wrong."""
    shape = Shape()
    weights = dense_layout(random_weights(shape, 0))
    stated = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    found = []
    for keys in (stated, {"llama.rope.scaling.factor": 4.0}, {"llama.rope.scale_linear": 4.0}, {}):
        path = write_gguf(tmp_path / "m.gguf", shape, weights, keys=keys)
        with Model.load(path) as model:
            found.append(model.logits(range(3, 30)).tobytes())
    assert found[0] == found[1] == found[2] != found[3]


# ---- tokenizers -------------------------------------------------------------------------------------------


def test_an_unknown_vocabulary(capsys, tmp_path):
    path = with_value(dense(tmp_path), "tokenizer.ggml.model", struct.pack("<Q", 5) + b"plamo")
    said = run_command(cli.main, capsys, "-m", path, "-p", "w1")
    assert_refused(said, 1, "unsupported tokenizer.ggml.model 'plamo'")
    with Model.load(path) as model:  # the numbers can still be had
        assert model.logits([1, 2]).shape == (2, 293)


def test_a_file_without_a_tokenizer(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("parity.synthetic.write_spm_vocabulary", lambda writer, n_vocab: None)
    said = run_command(cli.main, capsys, "-m", dense(tmp_path), "-p", "w1")
    assert_refused(said, 1, "the file has no tokenizer.ggml.")


def test_a_tokenizer_of_another_size(capsys, tmp_path):
    path = dense(tmp_path, reshaped("token_embd.weight", 280, 96))
    said = run_command(cli.main, capsys, "-m", path, "-p", "w1")
    assert_refused(said, 1, "output.weight has shape")

    def shrink(weights: Weights) -> None:
        for name in ("token_embd.weight", "output.weight"):
            weights[name] = np.ascontiguousarray(weights[name][:280])

    said = run_command(cli.main, capsys, "-m", dense(tmp_path, shrink), "-p", "w1")
    assert_refused(said, 1, "293 tokens")


def test_gguf_pys_minimal_file_of_each_magic_loads(tmp_path):
    """No key beyond what upstream needs: its defaults are ours."""
    shape = Shape(n_kv_heads=6, ranks=(8, 8))
    for magic in (b"GGUF", b"PWRI"):
        keys = RELU if magic == b"GGUF" else {}
        path = tmp_path / "m.gguf"
        write_gguf(path, shape, random_weights(shape, 0), keys=keys, minimal=True, magic=magic)
        with Model.load(path) as model:
            assert model.logits([1, 2]).shape == (2, 293)
    assert gguf.GGUF_VERSION == 3
