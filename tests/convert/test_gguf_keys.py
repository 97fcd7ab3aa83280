"""What a conversion from GGUF does with keys, tokenizer and provenance (about 5 s)."""

import json
import struct

import gguf
import pytest
from gguf import GGUFValueType as ValueType

from parity.gguf_file import GgufFile
from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.gguf_file import GgufFile as PackedFile
from powerinfer_toolkit.convert.outtypes import OutType
from powerinfer_toolkit.convert.settings import ConvertSettings

RELU = {"hidden_act": "relu", "intermediate_size": 1024}


@pytest.fixture
def convert(tmp_path):
    """convert(source path, name, settings...) -> path of the output."""

    def run(source, name, **settings):
        output = tmp_path / f"{name}.gguf"
        prepare(ConvertSettings(str(source), output, force=True, **settings)).write()
        return output

    return run


def string(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def add_keys(path, keys):
    """Insert keys (name -> packed value) behind those of a file; its data moves by whole alignments."""
    data = path.read_bytes()
    header = PackedFile(path)
    last = list(header.keys.values())[-1]
    at = data.index(string(last.name) + last.data) + len(string(last.name) + last.data)
    n_keys = len(header.keys) + len(keys)
    added = b"".join(string(name) + value for name, value in keys.items())
    assert len(added) % 32 == 0
    path.write_bytes(data[:16] + struct.pack("<Q", n_keys) + data[24:at] + added + data[at:])


def padded(keys):
    """The keys, and one more that makes their length a multiple of 32."""
    size = sum(len(string(name) + value) for name, value in keys.items())
    filler = "filler"
    rest = -(size + len(string(filler)) + 12) % 32
    return keys | {filler: struct.pack("<I", ValueType.STRING) + string("x" * rest)}


STRANGE = {
    "someone.number": struct.pack("<Id", ValueType.FLOAT64, 0.1),
    "someone.flag": struct.pack("<IB", ValueType.BOOL, 1),
    "someone.bytes": struct.pack("<I", ValueType.STRING) + string(b"\xff\xfe no text"),
    "someone.empty": struct.pack("<IIQ", ValueType.ARRAY, ValueType.UINT32, 0),
    "someone.words": struct.pack("<IIQ", ValueType.ARRAY, ValueType.STRING, 2)
    + string("a")
    + string(""),
    "someone.nested": struct.pack("<IIQ", ValueType.ARRAY, ValueType.ARRAY, 2)
    + struct.pack("<IQhh", ValueType.INT16, 2, -1, 7)
    + struct.pack("<IQ", ValueType.UINT8, 0),
    "\u540d\u524d": struct.pack("<II", ValueType.UINT32, 5),
    "llama.unheard_of": struct.pack("<II", ValueType.UINT32, 6),
    "powerinfer.unheard_of": struct.pack("<II", ValueType.UINT32, 7),
}


def test_unknown_keys_are_kept_byte_for_byte(checkpoint, convert):
    source = convert(checkpoint(RELU).path, "source", outtype=OutType.F32)
    add_keys(source, padded(STRANGE))
    output = convert(source, "output", outtype=OutType.Q8_0)
    kept = PackedFile(output).keys
    assert {name: kept[name].data for name in STRANGE} == STRANGE
    assert list(kept)[: len(PackedFile(source).keys)] == list(PackedFile(source).keys)
    assert GgufFile(output).key("someone.words") == ["a", ""]


def test_other_alignments_and_version_2(checkpoint, convert, tmp_path):
    source = convert(checkpoint(RELU).path, "source", outtype=OutType.F16)
    reader = GgufFile(source)._reader
    other = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(other, "llama")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            sub_type = field.types[-1] if field.types[0] is ValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_custom_alignment(4096)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with other.open("r+b") as stream:
        stream.write(b"PWRI" + struct.pack("<I", 2))
    output = convert(other, "output")
    assert GgufFile(output).key("general.alignment") is None
    want = {t.name: t.data.tobytes() for t in reader.tensors}
    assert {t.name: t.data.tobytes() for t in GgufFile(output)._reader.tensors} == want


def test_keys_of_predictors_stay_with_them(checkpoint, convert, predictor_dir):
    source = checkpoint(RELU)
    folder = predictor_dir(source, threshold=0.5)
    first = convert(source.path, "first", predictors=folder)
    told = {
        "powerinfer.predictor.recall": struct.pack("<If", ValueType.FLOAT32, 0.9),
        "powerinfer.predictor.perplexity_loss": struct.pack("<If", ValueType.FLOAT32, 0.004),
        "powerinfer.predictor.exact_layers": struct.pack(
            "<IIQBB", ValueType.ARRAY, ValueType.BOOL, 2, 1, 0
        ),
    }
    add_keys(first, padded(told))
    kept = PackedFile(convert(first, "kept", outtype=OutType.Q4_0)).keys
    assert {name: kept[name].data for name in told} == told
    assert kept["powerinfer.sparse_threshold"].value() == 0.5
    assert kept["powerinfer.sink_positions"].value() == 1
    replaced = PackedFile(convert(first, "replaced", predictors=folder)).keys
    dropped = PackedFile(convert(first, "dropped", drop_predictors=True)).keys
    assert not set(told) & (set(replaced) | set(dropped))
    assert dropped["powerinfer.predictor.kind"].value() == "all_active"


def test_statistics_stay_until_there_are_new_ones(checkpoint, convert, counts_file):
    source = checkpoint(RELU)
    first = convert(source.path, "first", activations=counts_file(source), activation_tokens=900)
    union = struct.pack("<IIQff", ValueType.ARRAY, ValueType.FLOAT32, 2, 0.25, 0.5)
    add_keys(first, padded({"powerinfer.statistics.union_density": union}))
    names = [f"powerinfer.statistics.{name}" for name in ("tokens", "sha256", "coverage")]
    names.append("powerinfer.statistics.union_density")
    before, carried = PackedFile(first).keys, PackedFile(convert(first, "carried")).keys
    assert all(carried[name] == before[name] for name in names)
    counts = counts_file(source, most=49)
    renewed = PackedFile(convert(first, "renewed", activations=counts)).keys
    assert renewed["powerinfer.statistics.sha256"] != before["powerinfer.statistics.sha256"]
    assert not {names[0], names[3]} & set(renewed)  # unknown of the new counts


def test_the_manifest_tells_every_step(checkpoint, convert, predictor_dir, counts_file):
    source = checkpoint(RELU)
    first = convert(source.path, "first", outtype=OutType.F16)
    second = convert(first, "second", outtype=OutType.Q8_0, activations=counts_file(source))
    third = convert(second, "third", predictors=predictor_dir(source))
    manifests = [
        json.loads(GgufFile(path).key("powerinfer.manifest")) for path in (first, second, third)
    ]
    made_by = manifests[0]["made_by"]
    assert "history" not in manifests[0]
    assert manifests[2]["history"] == [
        {"made_by": made_by, "settings": manifest["settings"]} for manifest in manifests[:2]
    ]
    assert [manifest["settings"]["outtype"] for manifest in manifests] == ["f16", "q8_0", "kept"]
    origins = manifests[2]["origins"]
    assert set(origins) == {"weights", "gguf", "activations", "predictors"}
    assert origins["weights"] == manifests[0]["origins"]["weights"]
    assert origins["activations"] == manifests[1]["origins"]["activations"]
    assert origins["gguf"]["name"] == "second.gguf"
    assert len(origins["gguf"]["sha256"]) == 64
    assert set(origins["gguf"]["sha256"]) <= set("0123456789abcdef")
    for path in (second, third):
        assert GgufFile(path).key("powerinfer.source.name") == "tiny"
        digest = GgufFile(path).key("powerinfer.source.sha256")
        assert digest == origins["weights"]["sha256"]
    dropped = convert(third, "fourth", drop_predictors=True)
    assert "predictors" not in json.loads(GgufFile(dropped).key("powerinfer.manifest"))["origins"]


def test_foreign_files_get_a_tokenizer_and_a_source(convert, smollm2_gguf):
    before = PackedFile(smollm2_gguf).keys
    output = convert(smollm2_gguf, "output")
    keys = PackedFile(output).keys
    changed = {"general.quantization_version", "general.file_type"}
    assert all(keys[name] == before[name] for name in before if name not in changed)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(keys["tokenizer.huggingface.json"].value())
    tokens = keys["tokenizer.ggml.tokens"].value()
    assert all(tokenizer.id_to_token(i) == tokens[i] for i in range(0, len(tokens), 97))
    assert keys["powerinfer.source.name"].value() == smollm2_gguf.name
    manifest = json.loads(keys["powerinfer.manifest"].value())
    assert manifest["origins"]["weights"] == manifest["origins"]["gguf"]
    assert manifest["origins"]["gguf"]["sha256"] == keys["powerinfer.source.sha256"].value()


def test_a_tokenizer_that_cannot_be_built_is_kept(checkpoint, convert, capsys):
    source = convert(checkpoint().path, "source", outtype=OutType.F16)
    packed = PackedFile(source).keys["tokenizer.ggml.model"].data
    data = source.read_bytes()
    source.write_bytes(data.replace(packed, packed.replace(b"gpt2", b"rwkv")))
    capsys.readouterr()
    output = convert(source, "output")
    assert "warning: the tokenizer's keys are kept, but not embedded" in capsys.readouterr().err
    assert GgufFile(output).key("tokenizer.ggml.model") == "rwkv"
