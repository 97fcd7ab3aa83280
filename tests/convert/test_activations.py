"""Activation counts: layouts, order, coverage curve, density, sidecars (about 3 s)."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors import safe_open

from parity.gguf_file import GgufFile
from powerinfer_toolkit.artifact import MANIFEST_SCHEMA
from powerinfer_toolkit.convert.activations import Statistics

RELU = {
    "hidden_act": "relu",
    "num_hidden_layers": 12,
}  # more than 10: sorted by number, not by name
N_LAYERS, N_FF = 12, 96


@pytest.fixture
def counts():
    """int64 [12, 96]; a layer's sum tells the layers apart."""
    drawn = np.random.default_rng(3).integers(0, 900, (N_LAYERS, N_FF))
    return drawn + 100 * np.arange(N_LAYERS)[:, None]


def save_torch(folder, counts, dtype=None):
    torch = pytest.importorskip("torch")
    folder.mkdir(exist_ok=True)
    for layer, row in enumerate(counts):
        tensor = torch.from_numpy(row)
        torch.save(tensor if dtype is None else tensor.to(dtype), folder / f"activation_{layer}.pt")
    return folder


def read_sidecar(path):
    with safe_open(path, "np") as file:
        return file.get_tensor("counts"), file.get_tensor("permutation"), file.metadata()


def check_orders(file, counts, tmp_path):
    kept, permutation, _ = read_sidecar(tmp_path / "out.activations.safetensors")
    np.testing.assert_array_equal(kept, counts)
    for layer, row in enumerate(counts):
        assert permutation[layer].tolist() == sorted(range(N_FF), key=lambda j: -row[j])


@pytest.mark.parametrize("kind", ["int64", "int32", "float32", "float16", "bfloat16", "uint8"])
def test_upstream_layout(checkpoint, converted, counts, tmp_path, kind):
    torch = pytest.importorskip("torch")
    counts = counts % 256  # bfloat16 and uint8 hold these exactly
    folder = save_torch(tmp_path / "activation", counts, getattr(torch, kind))
    check_orders(converted(checkpoint(RELU), activations=folder), counts, tmp_path)


def test_one_safetensors_file_per_layer(checkpoint, converted, counts, write_tensors, tmp_path):
    folder = tmp_path / "activation"
    folder.mkdir()
    for layer, row in enumerate(counts):
        write_tensors(folder / f"activation_{layer}.safetensors", {"any name": row}, "I64")
    check_orders(converted(checkpoint(RELU), activations=folder), counts, tmp_path)


@pytest.mark.parametrize("dtype", ["I64", "F32"])
def test_one_safetensors_file(checkpoint, converted, counts, write_tensors, tmp_path, dtype):
    path = tmp_path / "statistics.safetensors"
    write_tensors(path, {"counts": counts}, dtype, {"tokens": "5000"})
    file = converted(checkpoint(RELU), activations=path)
    check_orders(file, counts, tmp_path)
    assert file.key("powerinfer.statistics.tokens") == 5000


def test_sidecar_can_be_given_again(checkpoint, converted, counts, tmp_path):
    source, path = checkpoint(RELU), tmp_path / "counts.npy"
    np.save(path, counts)
    first = converted(source, activations=path, activation_tokens=4000)
    sidecar = tmp_path / "out.activations.safetensors"
    second = converted(source, activations=sidecar, output=tmp_path / "second.gguf")
    for key in ("tokens", "sha256", "coverage", "density"):
        name = f"powerinfer.statistics.{key}"
        assert second.key(name) == first.key(name)
    for tensor in first._tensors:
        assert first._tensors[tensor].data.tobytes() == second._tensors[tensor].data.tobytes()


def test_keys_and_sidecar_metadata(checkpoint, converted, counts, tmp_path):
    path = tmp_path / "counts.npy"
    np.save(path, counts.astype(np.float32))  # integers in float32: kept as int64
    file = converted(checkpoint(RELU), activations=path, activation_tokens=4000)
    digest = hashlib.sha256(counts.astype("<i8").tobytes()).hexdigest()
    assert file.key("powerinfer.statistics.sha256") == digest
    density = np.array(file.key("powerinfer.statistics.density"))
    np.testing.assert_allclose(density, counts.mean(axis=1) / 4000, rtol=1e-7)  # float32 rounding
    kept, permutation, metadata = read_sidecar(tmp_path / "out.activations.safetensors")
    assert (kept.dtype, permutation.dtype) == (np.int64, np.int32)
    assert metadata["tokens"] == "4000"
    assert metadata["sha256"] == digest
    manifest = json.loads(metadata["manifest"])
    assert manifest["origins"]["activations"] == {
        "name": "counts.npy",
        "revision": "",
        "sha256": digest,
    }
    in_model = json.loads(file.key("powerinfer.manifest"))
    weights = file.key("powerinfer.source.sha256")
    assert in_model["origins"]["weights"] == {"name": "tiny", "revision": "", "sha256": weights}


def test_frequencies_stay_float(checkpoint, converted, counts, tmp_path):
    path = tmp_path / "frequencies.npy"
    np.save(path, counts / 4000)
    file = converted(checkpoint(RELU), activations=path)
    kept, _, metadata = read_sidecar(tmp_path / "out.activations.safetensors")
    np.testing.assert_array_equal(kept, (counts / 4000).astype(np.float32))
    assert "tokens" not in metadata
    assert file.key("powerinfer.statistics.tokens") is None
    assert file.key("powerinfer.statistics.density") is None


def test_original_order_keeps_tensors_and_writes_the_curve(
    checkpoint, pi_convert, counts, tmp_path
):
    source = checkpoint(RELU)
    np.save(tmp_path / "counts.npy", counts)
    arguments = ["--activations", tmp_path / "counts.npy"]
    assert pi_convert(source.path, tmp_path / "hot.gguf", *arguments)[0] == 0
    arguments += ["--neuron-order", "original"]
    assert pi_convert(source.path, tmp_path / "original.gguf", *arguments)[0] == 0
    hot, original = (GgufFile(tmp_path / f"{name}.gguf") for name in ("hot", "original"))
    assert original.key("powerinfer.neuron_order") == "original"
    assert original.key("powerinfer.statistics.coverage") == hot.key(
        "powerinfer.statistics.coverage"
    )
    np.testing.assert_array_equal(
        original.tensor("blk.3.ffn_gate.weight"),
        source.tensors["model.layers.3.mlp.gate_proj.weight"],
    )
    _, permutation, _ = read_sidecar(tmp_path / "original.activations.safetensors")
    assert (permutation == np.arange(N_FF)).all()


def test_upstream_sidecar_is_in_file_order(checkpoint, pi_convert, counts, tmp_path):
    torch = pytest.importorskip("torch")
    source = checkpoint(RELU)
    np.save(tmp_path / "counts.npy", counts)
    command = source.path, tmp_path / "out.gguf", "--activations", tmp_path / "counts.npy"
    assert pi_convert(*command, "--upstream-sidecar")[0] == 0
    folder = tmp_path / "activation"
    assert len(list(folder.iterdir())) == N_LAYERS
    for layer, row in enumerate(counts):
        tensor = torch.load(folder / f"activation_{layer}.pt")
        assert tensor.tolist() == sorted(row, reverse=True)
    assert pi_convert(*command, "--upstream-sidecar")[0] == 1  # exists
    assert pi_convert(*command, "--upstream-sidecar", "--force")[0] == 0
    torch.save(torch.ones(3), folder / "activation_12.pt")
    code, _, err = pi_convert(*command, "--upstream-sidecar", "--force")
    assert code == 1
    assert "activation_12 of another model" in err


def break_counts(counts, how):
    broken = counts.astype(np.float64)
    if how == "negative":
        broken[3, 4] = -1
    elif how == "nan":
        broken[3, 4] = np.nan
    elif how == "silent":
        broken[3] = 0
    elif how == "too many":
        broken[3, 4] = 5001
    elif how == "short":
        broken = broken[:, :-1]
    elif how == "layers":
        broken = broken[:-1]
    elif how == "flat":
        broken = broken.reshape(-1)
    return broken


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("negative", "negative, NaN or infinite"),
        ("nan", "negative, NaN or infinite"),
        ("silent", "no neuron of layer 3 was ever active"),
        ("too many", "a count of 5001 is above the 5000 tokens"),
        ("short", "has shape [12, 95]; this model needs [12, 96]"),
        ("layers", "has shape [11, 96]"),
        ("flat", "has shape [1152]"),
    ],
)
def test_counts_that_are_refused(checkpoint, pi_convert, counts, tmp_path, how, said):
    np.save(tmp_path / "counts.npy", break_counts(counts, how))
    code, _, err = pi_convert(
        checkpoint(RELU).path,
        tmp_path / "out.gguf",
        *("--activations", tmp_path / "counts.npy", "--activation-tokens", 5000),
    )
    assert code == 1
    assert said in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["counts.npy", "tiny"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "lacks activation_7 (1 of 12 layers are missing)"),
        ("extra", "belongs to no layer: the model has 12"),
        ("shape", "activation_7.safetensors has shape [97]; this model needs [96]"),
        ("two", "holds 2 tensors"),
        ("complex", "unsupported type C64"),
    ],
)
def test_directories_that_are_refused(
    checkpoint, pi_convert, counts, write_tensors, tmp_path, how, said
):
    folder = tmp_path / "activation"
    folder.mkdir()
    for layer, row in enumerate(counts):
        write_tensors(folder / f"activation_{layer}.safetensors", {"x": row}, "I64")
    seventh = folder / "activation_7.safetensors"
    if how == "missing":
        seventh.unlink()
    elif how == "extra":
        write_tensors(folder / "activation_12.safetensors", {"x": counts[0]}, "I64")
    elif how == "shape":
        write_tensors(seventh, {"x": np.ones(97)}, "I64")
    elif how == "two":
        write_tensors(seventh, {"x": counts[0], "y": counts[0]}, "I64")
    else:
        seventh.write_bytes(seventh.read_bytes().replace(b"I64", b"C64"))
    code, _, err = pi_convert(checkpoint(RELU).path, tmp_path / "out.gguf", "--activations", folder)
    assert code == 1
    assert said in err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.npy", None, "does not exist"),
        ("counts.txt", b"1 2 3", "holds no activation counts"),
        ("counts.npy", b"1 2 3", "no numpy array file"),
        ("counts.safetensors", b"1 2 3", "no safetensors file"),
    ],
)
def test_files_that_are_refused(checkpoint, pi_convert, tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, _, err = pi_convert(
        checkpoint(RELU).path, tmp_path / "out.gguf", "--activations", tmp_path / name
    )
    assert code == 1
    assert said in err


def test_unknown_manifest_schema_is_refused(
    checkpoint, pi_convert, counts, write_tensors, tmp_path
):
    path = tmp_path / "counts.safetensors"
    manifest = {"schema": MANIFEST_SCHEMA + 1, "kind": "statistics", "origins": {}, "settings": {}}
    write_tensors(path, {"counts": counts}, "I64", {"manifest": json.dumps(manifest)})
    code, _, err = pi_convert(checkpoint(RELU).path, tmp_path / "out.gguf", "--activations", path)
    assert code == 1
    assert "manifest schema 2; this version knows 1" in err


@given(arrays(np.int64, (2, 200), elements=st.integers(0, 50)), st.integers(1, 200))
def test_coverage_curve(counts, n_ff):
    counts = counts[:, :n_ff]
    counts[:, 0] += 1  # no silent layer
    curve = Statistics("", counts, None, "").coverage().astype(np.float64)
    assert curve.shape == (2, 129)
    assert (curve[:, 0] == 0).all()
    assert (curve[:, -1] == 1).all()
    steps = np.diff(curve)
    rounding = 2**-23  # of two float32 values below 1
    assert (steps >= 0).all()
    assert (np.diff(steps) <= 2 * rounding).all()  # hottest first: ever less to gain
    share = np.arange(129) / 128
    assert (curve >= share - rounding).all()  # never below the even distribution
    hottest = -np.sort(-counts, axis=1)
    for point in (32, 64, 128):  # where point/128 of the neurons is a whole number, the plain sum
        if n_ff * point % 128 == 0:
            carried = hottest[:, : n_ff * point // 128].sum(axis=1) / counts.sum(axis=1)
            np.testing.assert_allclose(curve[:, point], carried, atol=rounding)
