"""What cannot be converted is refused with exit code, message and hint, and leaves no file (about 3 s)."""

import json

import numpy as np
import pytest

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 4.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["OPTForCausalLM"]}, "architecture OPTForCausalLM"),
        ({"architectures": None}, "architectures None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised checkpoint"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope scaling 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_unsupported_models_get_the_list_of_what_is(checkpoint, refused, tmp_path, changes, said):
    source = checkpoint()
    (source.path / "config.json").write_text(json.dumps(source.config | changes))
    err = refused(source.path, tmp_path / "out.gguf")
    assert said in err
    assert "not supported" in err
    assert (
        "supported: LlamaForCausalLM, MistralForCausalLM with hidden_act relu, silu, swish" in err
    )
    assert "default, linear, llama3" in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64', not an integer"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_attention_heads": 5}, "cannot share"),
        ({"num_attention_heads": 6}, "no multiple of 6 heads"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not true or false"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_parameters": [1]}, "not an object"),
        ({"rope_parameters": LLAMA3}, "high_freq_factor must be above"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0"),
        ({"hidden_size": 128, "head_dim": 16}, "has shape"),
        ({"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "9 tensors that the model does not use"),
        (
            {"tie_word_embeddings": True, "attention_bias": True},
            "lacks model.layers.0.self_attn.q_proj.bias",
        ),
        ({"vocab_size": 200}, "200"),
    ],
)
def test_impossible_configurations(checkpoint, refused, tmp_path, changes, said):
    source = checkpoint()
    (source.path / "config.json").write_text(json.dumps(source.config | changes))
    assert said in refused(source.path, tmp_path / "out.gguf")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_config_that_is_no_json_object(checkpoint, refused, tmp_path, text):
    source = checkpoint()
    (source.path / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in refused(source.path, tmp_path / "out.gguf")


def test_source_without_config(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refused(tmp_path / "empty", tmp_path / "out.gguf")


def test_source_that_is_a_file(checkpoint, refused, tmp_path):
    source = checkpoint()
    err = refused(source.path / "config.json", tmp_path / "out.gguf")
    assert "neither a directory nor a GGUF file" in err


@pytest.mark.parametrize("outtype", ["q8_0", "q4_0"])
def test_rows_that_are_no_whole_blocks(checkpoint, refused, pi_convert, tmp_path, outtype):
    source = checkpoint({"intermediate_size": 100})
    err = refused(source.path, tmp_path / "out.gguf", "--outtype", outtype)
    assert "blk.0.ffn_down.weight has rows of 100 elements" in err
    assert "f16" in err
    assert pi_convert(source.path, tmp_path / "out.gguf")[0] == 0  # f16 takes any size
    # transposed, the rows are n_embd long: any n_ff
    relu = checkpoint({"intermediate_size": 100, "hidden_act": "relu"}, name="relu")
    assert pi_convert(relu.path, tmp_path / "relu.gguf", "--outtype", outtype)[0] == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_weights_that_are_not_finite(checkpoint, refused, tmp_path, rewrite, value, outtype):
    source = checkpoint()
    rewrite(source, "model.layers.1.mlp.down_proj.weight", (-1, -1), value)
    err = refused(source.path, tmp_path / "out.gguf", "--outtype", outtype)
    assert "blk.1.ffn_down.weight holds NaN or infinite weights" in err


@pytest.mark.parametrize(
    ("outtype", "value", "fits"),
    [
        ("f16", 65504.0, True),
        ("f16", 65520.0, False),
        ("bf16", 1e38, True),
        ("bf16", np.finfo(np.float32).max, False),
        ("q8_0", 65504.0 * 127, True),
        ("q8_0", 65520.0 * 127, False),
        ("q4_0", -65504.0 * 8, True),
        ("q4_0", 65520.0 * 8, False),
        ("f32", np.finfo(np.float32).max, True),
    ],
)
def test_overflow(checkpoint, refused, pi_convert, tmp_path, rewrite, outtype, value, fits):
    source = checkpoint()
    rewrite(source, "model.layers.0.mlp.up_proj.weight", (3, 5), value)
    command = source.path, tmp_path / "out.gguf", "--outtype", outtype
    if fits:
        assert pi_convert(*command)[0] == 0
    else:
        err = refused(*command)
        assert f"beyond the range of {outtype.upper()}" in err
        assert "bf16" in err


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"intermediate_size": 1000}, (), "n_ff 1000 is below 1001"),
        ({}, ("--outtype", "q8_0"), "not Q8_0"),
        ({}, ("--outtype", "bf16"), "not BF16"),
        ({"attention_bias": True}, (), "attention biases"),
        ({"head_dim": 32}, (), "head_dim 32"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}}, (), "llama3"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
            (),
            "sliding window of 64",
        ),
    ],
)
def test_upstream_dialect_where_upstream_would_be_wrong(
    checkpoint, refused, pi_convert, tmp_path, changes, options, said
):
    source = checkpoint({"hidden_act": "relu", "intermediate_size": 1024} | changes)
    output = tmp_path / "out.gguf"
    err = refused(source.path, output, "--dialect", "upstream", *options)
    assert "upstream cannot run this" in err
    assert said in err
    assert pi_convert(source.path, output, *options)[0] == 0
    assert output.read_bytes()[:4] == b"GGUF"  # auto takes the extended dialect instead


def test_options_that_do_not_belong_together(checkpoint, refused, tmp_path, predictor_dir):
    source = checkpoint()
    command = source.path, tmp_path / "out.gguf"
    predictors = predictor_dir(source)
    assert "for ReLU models" in refused(*command, "--predictors", predictors)
    assert "applies ReLU to the gate" in refused(*command, "--dialect", "upstream")
    for option in (
        ("--neuron-order", "hot-first"),
        ("--activation-tokens", 5),
        ("--upstream-sidecar",),
    ):
        assert "needs --activations" in refused(*command, *option, code=2)
    assert "must be positive" in refused(*command, "--activation-tokens", 0, code=2)


def break_predictors(folder, how, write):
    first = folder / "model_0.safetensors"
    ones = np.ones
    if how == "missing":
        (folder / "model_1.safetensors").unlink()
    elif how == "extra":
        (folder / "model_2.safetensors").write_bytes(first.read_bytes())
    elif how == "twice":
        (folder / "model_00.safetensors").write_bytes(first.read_bytes())
    elif how == "cut":
        first.write_bytes(first.read_bytes()[:-4])
    elif how == "threshold":
        (folder / "config.json").write_text('{"sparse_threshold": "high"}')
    elif how == "no fc2":
        write(first, {"fc1.weight": ones((32, 64))})
    elif how == "bias":
        write(
            first, {"fc1.weight": ones((8, 64)), "fc2.weight": ones((96, 8)), "fc1.bias": ones(8)}
        )
    else:
        shapes = {
            "rank": ((32, 64), (96, 16)),
            "n_ff": ((32, 64), (97, 32)),
            "n_embd": ((32, 65), (96, 32)),
        }
        fc1, fc2 = (ones(shape) for shape in shapes.get(how, ((32, 64), (96, 32))))
        if how == "zero":
            fc2[:] = 0
        if how == "nan":
            fc1[0, 0] = np.nan
        if how == "overflow":
            fc1[0, 0] = 1e6
        write(first, {"fc1.weight": fc1, "fc2.weight": fc2})


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "lacks model_1 (1 of 2 layers are missing)"),
        ("extra", "belongs to no layer: the model has 2"),
        ("twice", "both for layer 0"),
        ("cut", "cut short"),
        ("threshold", "sparse_threshold is 'high'"),
        ("no fc2", "lacks fc2.weight"),
        ("bias", "holds fc1.bias"),
        ("rank", "[rank, 64] and [96, rank]"),
        ("n_ff", "[rank, 64] and [96, rank]"),
        ("n_embd", "[rank, 64] and [96, rank]"),
        ("zero", "blk.0.fc2.weight is all zero"),
        ("nan", "blk.0.fc1.weight holds NaN"),
        ("overflow", "blk.0.fc1.weight holds 1e+06"),
    ],
)
def test_predictors(checkpoint, refused, predictor_dir, write_tensors, tmp_path, how, said):
    source = checkpoint({"hidden_act": "relu"})
    folder = predictor_dir(source)
    break_predictors(folder, how, write_tensors)
    assert said in refused(source.path, tmp_path / "out.gguf", "--predictors", folder)


def test_predictors_that_are_no_directory(checkpoint, refused, tmp_path):
    source = checkpoint({"hidden_act": "relu"})
    err = refused(source.path, tmp_path / "out.gguf", "--predictors", tmp_path / "nowhere")
    assert "not a directory" in err
