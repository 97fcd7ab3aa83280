"""GGUF in, GGUF out: the same tensors as from the checkpoint, the same function in every layout (about 15 s)."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.gguf_file import GgufFile
from parity.reference import Reference
from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.neurons import compose
from powerinfer_toolkit.convert.outtypes import OutType
from powerinfer_toolkit.convert.settings import ConvertSettings
from powerinfer_toolkit.gguf_format import Activation, Dialect, NeuronOrder

# n_ff for upstream's dialect, rows of 256 for K types
RELU = {
    "hidden_act": "relu",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
}
SILU = RELU | {"hidden_act": "silu"}
PROMPT = list(range(3, 20))


@pytest.fixture
def convert(tmp_path):
    """convert(source path, name, settings...) -> path of the output."""

    def run(source, name, **settings):
        output = tmp_path / f"{name}.gguf"
        prepare(ConvertSettings(str(source), output, **settings)).write()
        return output

    return run


def stored(path):
    """Tensor name -> type, shape, bytes."""
    reader = GgufFile(path)._reader
    return {
        t.name: (t.tensor_type.name, t.shape.tolist(), t.data.tobytes()) for t in reader.tensors
    }


def assert_same_tensors(first, second):
    left, right = stored(first), stored(second)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


def file_keys(path):
    """Key -> value, without what tells of the way here."""
    fields = GgufFile(path)._reader.fields
    own = ("GGUF.", "powerinfer.manifest")
    return {name: f.contents() for name, f in fields.items() if not name.startswith(own)}


@pytest.fixture
def counts(tmp_path):
    """counts(seed) -> path of .npy counts [2, 1024], many equal."""

    def make(seed):
        path = tmp_path / f"counts{seed}.npy"
        np.save(path, np.random.default_rng(seed).integers(1, 300, (2, 1024)))
        return path

    return make


@pytest.mark.parametrize("config", [SILU, RELU], ids=["dense", "sparse"])
@pytest.mark.parametrize("outtype", ["f32", "q8_0", "q4_k_m"])
def test_nothing_asked_nothing_changed(checkpoint, convert, config, outtype):
    first = convert(checkpoint(config).path, "first", outtype=OutType(outtype))
    second = convert(first, "second")
    assert_same_tensors(first, second)
    assert file_keys(first) == file_keys(second)
    assert first.read_bytes()[:4] == second.read_bytes()[:4]


@pytest.mark.parametrize("outtype", OutType)
def test_requantising_float32_equals_the_checkpoint(checkpoint, convert, outtype):
    source = checkpoint(SILU).path
    middle = convert(source, "f32", outtype=OutType.F32)
    got, want = (convert(s, n, outtype=outtype) for s, n in ((middle, "got"), (source, "want")))
    assert_same_tensors(got, want)
    assert file_keys(got) == file_keys(want)


@pytest.mark.parametrize("outtype", ["f32", "f16", "q4_0", "q6_k"])
def test_every_way_to_lay_it_out_computes_the_same(
    checkpoint, convert, counts, predictor_dir, outtype
):
    """Re-ordering and changing the dialect: float64 logits equal but for the order of sums."""
    source = checkpoint(RELU | {"tie_word_embeddings": True})
    ways = {"predictors": predictor_dir(source), "activations": counts(1)}
    first = convert(source.path, "first", outtype=OutType(outtype), **ways)
    want = Reference.load(first).logits(PROMPT, masked=np.ones(len(PROMPT), bool))
    steps = [
        {"dialect": Dialect.EXTENDED},
        {"activations": counts(2)},
        {"neuron_order": NeuronOrder.ORIGINAL},
        {"neuron_order": NeuronOrder.HOT_FIRST},
        {"dialect": None},
    ]
    path = first
    for number, settings in enumerate(steps):
        path = convert(path, f"step{number}", **settings)
        got = Reference.load(path).logits(PROMPT, masked=np.ones(len(PROMPT), bool))
        np.testing.assert_allclose(got, want, atol=1e-12 * np.abs(want).max())
    assert GgufFile(path).key("powerinfer.neuron_order") == "hot_first"


@pytest.mark.parametrize("outtype", ["f16", "q4_0"])
def test_upstream_and_back(checkpoint, convert, outtype):
    source = checkpoint(RELU).path
    extended = convert(source, "e", outtype=OutType(outtype), dialect=Dialect.EXTENDED)
    upstream = convert(source, "u", outtype=OutType(outtype))
    assert upstream.read_bytes()[:4] == b"PWRI"
    to_upstream = convert(extended, "eu", dialect=Dialect.UPSTREAM)
    assert_same_tensors(to_upstream, upstream)  # all-zero predictors included
    assert file_keys(to_upstream) == file_keys(upstream)
    back = convert(upstream, "ue", dialect=Dialect.EXTENDED)
    assert_same_tensors(back, extended)
    assert file_keys(back) == file_keys(extended)
    assert convert(extended, "kept").read_bytes()[:4] == b"GGUF"  # auto keeps the dialect


def test_upstream_gives_way_to_types_it_cannot_run(checkpoint, convert):
    upstream = convert(checkpoint(RELU).path, "u", outtype=OutType.F16)
    requantised = convert(upstream, "q", outtype=OutType.Q4_K_M)
    assert requantised.read_bytes()[:4] == b"GGUF"
    file = GgufFile(requantised)
    assert file.key("powerinfer.dialect") == "extended"
    assert file.key("powerinfer.predictor.kind") == "none"
    assert not file.has("blk.0.fc1.weight")
    assert file.key("powerinfer.sparse_threshold") is None


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16"])
def test_dense_and_sparse_layout_of_a_silu_model(checkpoint, convert, outtype):
    dense = convert(checkpoint(SILU).path, "dense", outtype=OutType(outtype))
    sparse = convert(dense, "sparse", dialect=Dialect.EXTENDED)
    file = GgufFile(sparse)
    assert file.has("blk.0.ffn_down_t.weight")
    assert not file.has("blk.0.ffn_down.weight")
    assert file.key("powerinfer.activation") == "silu"
    assert file.key("powerinfer.ffn_modes") == ["dense"]
    want = Reference.load(dense).logits(PROMPT)
    np.testing.assert_allclose(
        Reference.load(sparse).logits(PROMPT), want, atol=1e-12 * np.abs(want).max()
    )
    back = convert(sparse, "back", dialect="dense")
    assert_same_tensors(back, dense)
    assert file_keys(back) == file_keys(dense)


def test_quantised_down_is_transposed_by_its_values(checkpoint, convert):
    dense = convert(checkpoint(SILU).path, "dense", outtype=OutType.Q4_K_M)
    sparse = convert(dense, "sparse", dialect=Dialect.EXTENDED)
    for layer in (0, 1):
        down = GgufFile(dense).tensor(f"blk.{layer}.ffn_down.weight")
        kind = GgufFile(dense).type_of(f"blk.{layer}.ffn_down.weight")
        file = GgufFile(sparse)
        assert file.type_of(f"blk.{layer}.ffn_down_t.weight") == kind
        # quantised twice: each time at most about a tenth of 4 bits' range, see test_types
        error = file.tensor(f"blk.{layer}.ffn_down_t.weight") - down.T
        assert np.linalg.norm(error) < 0.1 * np.linalg.norm(down)
    names = [name for name in stored(dense) if "ffn_down" not in name]
    assert all(stored(dense)[name] == stored(sparse)[name] for name in names)


@pytest.mark.parametrize("first", ["original", "hot"])
@pytest.mark.parametrize("then", ["original", "hot"])
def test_permutations_compose(checkpoint, convert, counts, predictor_dir, first, then):
    """Whatever the order before, new counts give the file that the checkpoint with these counts gives."""
    source = checkpoint(RELU)
    common = {"outtype": OutType.Q4_K, "predictors": predictor_dir(source)}

    def ordered(path, name, order, number, **more):
        kinds = {"original": NeuronOrder.ORIGINAL, "hot": None}
        return convert(path, name, activations=counts(number), neuron_order=kinds[order], **more)

    middle = ordered(source.path, "middle", first, 1, **common)
    got = ordered(middle, "got", then, 2)
    want = ordered(source.path, "want", then, 2, **common)
    assert_same_tensors(got, want)
    keys = file_keys(got)
    assert keys == file_keys(want)
    sidecars = (path.with_suffix(".activations.safetensors") for path in (got, want))
    from safetensors.numpy import load_file

    left, right = map(load_file, sidecars)
    assert all((left[name] == right[name]).all() for name in ("counts", "permutation"))


@given(st.integers(0, 1 << 30), st.integers(1, 40))
def test_composition_of_random_permutations(seed, n_ff):
    rng = np.random.default_rng(seed)
    source, wanted = (np.stack([rng.permutation(n_ff) for _ in range(3)]) for _ in range(2))
    places = compose(source, wanted)
    places = np.tile(np.arange(n_ff), (3, 1)) if places is None else places
    np.testing.assert_array_equal(np.take_along_axis(source, places, axis=1), wanted)
    assert compose(source, source) is None
    back = compose(source, None)
    identity = np.tile(np.arange(n_ff), (3, 1))
    back = identity if back is None else back
    np.testing.assert_array_equal(np.take_along_axis(source, back, axis=1), identity)


def test_predictors_added_replaced_and_dropped(checkpoint, convert, counts, predictor_dir):
    source = checkpoint(RELU)
    folder = predictor_dir(source, threshold=-0.25)
    options = {"outtype": OutType.Q4_K, "activations": counts(1)}
    without = convert(source.path, "without", **options)
    want = convert(source.path, "want", predictors=folder, **options)
    added = convert(without, "added", predictors=folder)
    assert_same_tensors(added, want)  # fc2 follows the order that the sidecar knows
    assert file_keys(added) == file_keys(want)
    dropped = convert(added, "dropped", drop_predictors=True)
    assert_same_tensors(dropped, without)
    assert file_keys(dropped) == file_keys(without)
    kept = convert(added, "kept", activations=counts(2))
    again = convert(kept, "again", predictors=folder)
    assert_same_tensors(kept, again)


def test_hot_first_without_its_sidecar(checkpoint, pi_convert, convert, counts, predictor_dir):
    source = checkpoint(RELU)
    hot = convert(source.path, "hot", activations=counts(1))
    sidecar = hot.with_suffix(".activations.safetensors")
    sidecar.rename(hot.with_name("elsewhere.safetensors"))
    output = hot.with_name("out.gguf")
    for option in (
        ("--activations", counts(2)),
        ("--neuron-order", "original"),
        ("--predictors", predictor_dir(source)),
    ):
        code, _, err = pi_convert(hot, output, *option)
        assert code == 1
        assert "hot.gguf has its neurons hot first, and hot.activations.safetensors" in err
        assert "hint: put hot.activations.safetensors beside it, or convert from the ch" in err
    assert pi_convert(hot, output, "--outtype", "q8_0")[0] == 0  # nobody has to know the numbers
    assert GgufFile(output).key("powerinfer.neuron_order") == "hot_first"
    other = convert(source.path, "other", activations=counts(2))
    other.with_suffix(".activations.safetensors").rename(sidecar)
    code, _, err = pi_convert(hot, output, "--force")
    assert code == 1
    assert "does not belong to hot.gguf: other activation counts" in err


def write_foreign(path, tensors, keys=(), magic=b"GGUF"):
    """A file that this toolkit did not write: keys and tensors through gguf-py."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": 512,
        "embedding_length": 256,
        "block_count": 2,
        "feed_forward_length": 1024,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key in keys:
        writer.add_key_value(*key)
    for name, (kind, shape, data) in tensors.items():
        encoded = np.frombuffer(data, np.uint8).reshape(*shape[:0:-1], -1)
        writer.add_tensor(name, encoded, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("r+b") as stream:
        stream.write(magic)
    return path


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4", "Q4_1", "IQ4_NL"])
def test_types_that_others_write(checkpoint, convert, pi_convert, tmp_path, kind):
    """Dequantised as gguf-py does, or copied; MXFP4 and NVFP4 are never written anew."""
    libgguf = pytest.importorskip("libgguf")
    plain = convert(checkpoint(SILU).path, "plain", outtype=OutType.F32)
    tensors = stored(plain)
    for name, (_, shape, data) in tensors.items():
        if len(shape) > 1:
            rows = np.frombuffer(data, np.float32).reshape(shape[::-1])
            packed = libgguf.quantize_rows(rows, gguf.GGMLQuantizationType[kind].value)
            tensors[name] = (kind, shape, packed.tobytes())
    foreign = write_foreign(tmp_path / "foreign.gguf", tensors)
    assert_same_tensors(convert(foreign, "kept"), foreign)
    floats = convert(foreign, "floats", outtype=OutType.F32)
    for name in tensors:
        np.testing.assert_array_equal(GgufFile(floats).tensor(name), GgufFile(foreign).tensor(name))
    command = foreign, tmp_path / "sparse.gguf", "--dialect", "extended"
    code, _, err = pi_convert(*command)
    if kind in ("MXFP4", "NVFP4"):
        assert code == 1
        assert f"blk.0.ffn_down_t.weight is {kind}, which can be copied but not written" in err
        assert pi_convert(*command, "--outtype", "q5_k_m")[0] == 0
    else:
        assert code == 0
        assert "matrices are quantised already and are quantised again" in err


def test_requantising_is_warned_about(checkpoint, convert, pi_convert, tmp_path):
    q8_0 = convert(checkpoint(SILU).path, "q8_0", outtype=OutType.Q8_0)
    output = tmp_path / "out.gguf"
    code, _, err = pi_convert(q8_0, output, "--outtype", "q4_0")
    assert code == 0
    assert (
        "warning: 14 matrices are quantised already and are quantised again (Q8_0 -> Q4_0 (14)"
        in err
    )
    for outtype in ("q8_0", "f16"):
        assert "quantised again" not in pi_convert(q8_0, output, "--force", "--outtype", outtype)[2]
    want = np.float32(GgufFile(q8_0).tensor("blk.0.ffn_up.weight"))
    pi_convert(q8_0, output, "--force", "--outtype", "q4_0")
    encoded = gguf.quants.quantize(want, gguf.GGMLQuantizationType.Q4_0)
    assert stored(output)["blk.0.ffn_up.weight"][2] == encoded.tobytes()


def test_a_relu_model_that_was_converted_as_dense(checkpoint, convert, pi_convert, tmp_path):
    """llama.cpp's converter does not ask which activation: --hidden-act says it."""
    relu = checkpoint(RELU)
    want = convert(relu.path, "want", outtype=OutType.F16)
    silu = checkpoint(SILU, name="silu")  # the same weights
    dense = write_foreign(tmp_path / "dense.gguf", stored(convert(silu.path, "s")))
    got = convert(dense, "got", hidden_act=Activation.RELU, dialect=Dialect.EXTENDED)
    names = [name for name in stored(want) if "fc" not in name]
    assert all(stored(want)[name] == stored(got)[name] for name in names)
    assert GgufFile(got).key("powerinfer.activation") == "relu"
    code, _, err = pi_convert(got, tmp_path / "x.gguf", "--hidden-act", "silu")
    assert code == 2
    assert "the file says relu" in err
    code, _, err = pi_convert(got, tmp_path / "x.gguf", "--dialect", "dense")
    assert code == 1
    assert "a ReLU model is never written as a dense file" in err


def test_files_of_upstreams_converter(convert, tmp_path):
    """PWRI without any key of ours: ReLU, trained predictors, original order."""
    from gguf import GGMLQuantizationType as Type

    from parity.upstream_file import PROMPT as TOKENS
    from parity.upstream_file import UpstreamFile, write_upstream

    spec = UpstreamFile(Type.F16, n_ff=1024, threshold=0.5)
    upstream = write_upstream(tmp_path / "upstream.gguf", spec)
    masked = np.ones(len(TOKENS), bool)
    want = Reference.load(upstream).logits(TOKENS, masked=masked)
    extended = convert(upstream, "extended", dialect=Dialect.EXTENDED)
    got = Reference.load(extended).logits(TOKENS, masked=masked)
    np.testing.assert_allclose(got, want, atol=1e-12 * np.abs(want).max())
    file = GgufFile(extended)
    assert file.key("powerinfer.sparse_threshold") == 0.5
    assert file.key("powerinfer.ffn_modes") == ["dense", "exact", "predicted"]
    assert file.key("tokenizer.huggingface.json").startswith("{")
    back = convert(extended, "back", dialect=Dialect.UPSTREAM)
    assert_same_tensors(back, upstream)
    assert convert(upstream, "kept").read_bytes()[:4] == b"PWRI"
