"""Every tensor of an output, dequantised, equals what gguf-py makes of the source (about 3 s)."""

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from powerinfer_toolkit.gguf_format import Dialect

OUTTYPES = ["f32", "f16", "bf16", "q8_0", "q4_0"]
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
RELU = {"hidden_act": "relu", "intermediate_size": 1024, "hidden_size": 64}


def interleaved(values, head_dim):
    """By hand: rows i and i + head_dim / 2 of every head become neighbours."""
    rows = []
    for head in range(len(values) // head_dim):
        for i in range(head_dim // 2):
            rows += [values[head * head_dim + i], values[head * head_dim + i + head_dim // 2]]
    return np.stack(rows)


def expected_tensors(source, orders=None):
    """GGUF name -> float32 before encoding; `orders` [n_layers, n_ff] as in a hot-first file."""
    relu = source.config["hidden_act"] == "relu"
    head_dim = source.config.get("head_dim", source.n_embd // source.config["num_attention_heads"])
    expected = {}
    for hf_name, values in source.tensors.items():
        stem, kind = hf_name.rsplit(".", 1)
        prefix, layer = "", None
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        name = NAMES[stem]
        order = slice(None) if orders is None or layer is None else orders[int(layer)]
        if name in ("attn_q", "attn_k"):
            values = interleaved(values, head_dim)
        elif name in ("ffn_gate", "ffn_up"):
            values = values[order]
        elif name == "ffn_down":
            values = values[:, order]
            name, values = ("ffn_down_t", values.T) if relu else (name, values)
        expected[f"{prefix}{name}.{kind}"] = np.ascontiguousarray(values)
    return expected


def check_all(file, expected, outtype):
    stored = {tensor.name: tensor for tensor in file._reader.tensors}
    for name, values in expected.items():
        kind = gguf.GGMLQuantizationType[outtype.upper() if values.ndim > 1 else "F32"]
        if outtype == "q4_0" and name in ("token_embd.weight", "output.weight"):
            kind = gguf.GGMLQuantizationType.Q8_0
        assert stored[name].tensor_type == kind, name
        assert tuple(stored[name].shape) == values.shape[::-1]
        encoded = gguf.quants.quantize(values, kind)
        assert stored[name].data.tobytes() == encoded.tobytes(), name  # bit for bit


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_dense_file(checkpoint, converted, outtype):
    source = checkpoint()
    file = converted(source, outtype=outtype)
    expected = expected_tensors(source)
    check_all(file, expected, outtype)
    assert set(file._tensors) == set(expected)
    assert file.key("powerinfer.activation") == "silu"
    assert file.key("powerinfer.ffn_modes") == ["dense"]
    assert file.key("powerinfer.dialect") is None


@pytest.mark.parametrize("outtype", OUTTYPES)
@pytest.mark.parametrize("dialect", [None, Dialect.EXTENDED])
def test_sparse_file_in_hot_first_order(
    checkpoint, converted, predictor_dir, counts_file, tmp_path, outtype, dialect
):
    source = checkpoint(RELU)
    counts = counts_file(source)
    file = converted(
        source,
        outtype=outtype,
        dialect=dialect,
        activations=counts,
        predictors=predictor_dir(source, threshold=-0.25),
    )
    upstream = dialect is None and outtype in ("f16", "q4_0")
    magic = (tmp_path / "out.gguf").read_bytes()[:4]
    assert magic == (b"PWRI" if upstream else b"GGUF")
    assert file.key("powerinfer.dialect") == ("upstream" if upstream else "extended")
    assert file.key("powerinfer.sparse_threshold") == -0.25
    assert file.key("powerinfer.ffn_modes") == ["dense", "exact", "predicted"]
    assert file.key("powerinfer.neuron_order") == "hot_first"
    orders = [sorted(range(source.n_ff), key=lambda j: -row[j]) for row in np.load(counts)]
    expected = expected_tensors(source, np.array(orders))
    check_all(file, expected, outtype)
    names = [f"blk.{layer}.{fc}.weight" for layer in (0, 1) for fc in ("fc1", "fc2")]
    assert set(file._tensors) == {*expected, *names}


@pytest.mark.parametrize(
    ("outtype", "fc1", "fc2"),
    [
        ("f32", ("F16", "F16"), ("F16", "F16")),
        ("f16", ("F16", "F16"), ("F16", "F16")),
        ("bf16", ("F16", "F16"), ("F16", "F16")),
        ("q8_0", ("Q8_0", "Q8_0"), ("Q8_0", "F16")),  # ranks 32 and 40
        ("q4_0", ("Q8_0", "Q8_0"), ("Q5_0", "F16")),
        ("q5_k", ("Q8_0", "Q8_0"), ("Q5_0", "F16")),
        ("q5_1", ("Q8_0", "Q8_0"), ("Q8_0", "F16")),
    ],
)
def test_predictor_types_and_values(
    checkpoint, converted, predictor_dir, counts_file, outtype, fc1, fc2
):
    source = checkpoint(RELU)
    folder, counts = predictor_dir(source), counts_file(source)
    file = converted(source, outtype=outtype, predictors=folder, activations=counts)
    for layer in range(2):
        order = np.argsort(-np.load(counts)[layer], kind="stable")
        given = load_file(folder / f"model_{layer}.safetensors")
        wanted = {"fc1": given["fc1.weight"], "fc2": given["fc2.weight"][order]}
        for name, types in (("fc1", fc1), ("fc2", fc2)):
            stored = file._tensors[f"blk.{layer}.{name}.weight"]
            kind = gguf.GGMLQuantizationType[types[layer]]
            assert stored.tensor_type == kind
            assert stored.data.tobytes() == gguf.quants.quantize(wanted[name], kind).tobytes()


@pytest.mark.parametrize("outtype", ["f16", "q4_0"])
def test_upstream_without_predictors_computes_every_neuron(checkpoint, converted, outtype):
    source = checkpoint(RELU | {"tie_word_embeddings": True})
    file = converted(source, outtype=outtype)
    for layer in range(2):
        for name, shape in (("fc1", (32, source.n_embd)), ("fc2", (source.n_ff, 32))):
            stored = file._tensors[f"blk.{layer}.{name}.weight"]
            assert stored.tensor_type.name == "F16"
            assert stored.data.shape == shape
            assert not stored.data.any()  # logits are 0, and 0 >= threshold 0: all active
    assert file.key("powerinfer.sparse_threshold") == 0.0
    assert file.key("powerinfer.predictor.kind") == "all_active"
    assert file.key("powerinfer.ffn_modes") == ["dense", "exact"]
    output, embedding = file._tensors["output.weight"], file._tensors["token_embd.weight"]
    assert output.data.tobytes() == embedding.data.tobytes()
    known = {"token_embd", "output_norm", "output"} | set(NAMES.values()) - {"ffn_down"}
    known |= {"ffn_down_t", "fc1", "fc2"}
    assert {name.split(".")[-2] for name in file._tensors} <= known


def test_extended_without_predictors_has_none(checkpoint, converted):
    file = converted(checkpoint({"hidden_act": "relu", "tie_word_embeddings": True}))
    assert file.key("powerinfer.predictor.kind") == "none"
    assert file.key("powerinfer.sparse_threshold") is None
    assert not file.has("blk.0.fc1.weight")
    assert not file.has("output.weight")
    assert not file.has("blk.0.ffn_down.weight")  # else other engines would run it as SiLU


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
def test_source_types(checkpoint, converted, dtype):
    source = checkpoint(dtype=dtype)
    check_all(converted(source, outtype="f32"), expected_tensors(source), "f32")


def test_dense_file_in_hot_first_order(checkpoint, converted, counts_file):
    source = checkpoint()
    counts = counts_file(source)
    file = converted(source, outtype="q8_0", activations=counts)
    orders = np.argsort(-np.load(counts), axis=1, kind="stable")
    check_all(file, expected_tensors(source, orders), "q8_0")


def test_large_tensors_are_converted_in_blocks(checkpoint, converted, counts_file):
    """Above 2^20 elements a tensor is converted in several blocks; the bits must not show it."""
    source = checkpoint(RELU | {"hidden_size": 512, "intermediate_size": 5000})
    assert source.n_embd * source.n_ff > 2 << 20
    counts = counts_file(source, most=1000)
    file = converted(source, outtype="q4_0", activations=counts)
    orders = np.argsort(-np.load(counts), axis=1, kind="stable")
    check_all(file, expected_tensors(source, orders), "q4_0")


def test_attention_biases_and_explicit_head_dim(checkpoint, converted):
    source = checkpoint({"attention_bias": True, "head_dim": 24, "num_hidden_layers": 1})
    file = converted(source, outtype="f16")
    expected = expected_tensors(source)
    assert set(file._tensors) == set(expected)
    check_all(file, expected, "f16")
    assert file.key("llama.attention.key_length") == 24
    assert file.key("llama.attention.value_length") == 24
    assert file.key("llama.rope.dimension_count") == 24


def test_keys_of_llama_cpp(checkpoint, converted):
    source = checkpoint({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5})
    file = converted(source, outtype="q4_0")
    assert file.key("general.architecture") == "llama"
    assert file.key("general.name") == "tiny"
    assert file.key("general.file_type") == 2
    assert file.key("general.quantization_version") == 2
    values = {
        "context_length": 512,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "vocab_size": 300,
        "rope.dimension_count": 16,
        "rope.freq_base": 5e5,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 4.0,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "attention.key_length": None,
    }
    assert {name: file.key(f"llama.{name}") for name in values} == values
    assert file.key("tokenizer.ggml.model") == "gpt2"
    assert len(file.key("tokenizer.ggml.tokens")) == 300
    assert file.key("tokenizer.huggingface.json").startswith("{")


def test_sliding_window(checkpoint, converted):
    mistral = {"architectures": ["MistralForCausalLM"]}
    window = "llama.attention.sliding_window"
    assert converted(checkpoint(mistral | {"sliding_window": 100})).key(window) == 100
    assert converted(checkpoint(mistral | {"sliding_window": None}), force=True).key(window) is None
    assert converted(checkpoint(mistral), force=True).key(window) is None  # 4096 > context
