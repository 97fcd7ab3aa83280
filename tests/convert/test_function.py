"""The file computes what the checkpoint computes: FFN under reordering, and whole models (about 15 s)."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from parity.reference import Reference
from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.outtypes import OutType
from powerinfer_toolkit.convert.settings import ConvertSettings

RELU = {"hidden_act": "relu", "intermediate_size": 1024, "num_hidden_layers": 1}


def ffn(x, gate, up, down_t, logits, act):
    """down^T (mask * act(gate x) * up x) in float64; a neuron is masked where its logit is below 0."""
    hidden = act(x @ gate.T) * (x @ up.T) * (logits >= 0)
    return hidden @ down_t


def relu(x):
    return np.maximum(x, 0.0)


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("hidden_act", ["relu", "silu"])
def test_hot_first_order_keeps_the_ffn(
    checkpoint, converted, predictor_dir, counts_file, hidden_act
):
    source = checkpoint(RELU | {"hidden_act": hidden_act})
    settings = {"activations": counts_file(source), "outtype": "f32"}
    if hidden_act == "relu":
        settings["predictors"] = predictor_dir(source)
    file = converted(source, **settings)
    x = np.random.default_rng(4).normal(size=(5, source.n_embd))
    act, prefix = {"relu": relu, "silu": silu}[hidden_act], "model.layers.0.mlp."
    gate, up, down = (
        source.tensors[f"{prefix}{name}_proj.weight"].astype(np.float64)
        for name in ("gate", "up", "down")
    )

    def tensor(name):
        return file.tensor(f"blk.0.{name}.weight")

    if hidden_act == "relu":
        given = load_file(settings["predictors"] / "model_0.safetensors")
        logits = relu(x @ given["fc1.weight"].T) @ given["fc2.weight"].T
        file_logits = relu(x @ tensor("fc1").T) @ tensor("fc2").T
        assert 0.1 < (logits < 0).mean() < 0.9
        file_down_t = tensor("ffn_down_t")
    else:
        logits = file_logits = np.zeros((5, source.n_ff))
        file_down_t = tensor("ffn_down").T
    want = ffn(x, gate, up, down.T, logits, act)
    got = ffn(x, tensor("ffn_gate"), tensor("ffn_up"), file_down_t, file_logits, act)
    assert not np.array_equal(tensor("ffn_gate"), gate)  # the order did change
    np.testing.assert_allclose(got, want, atol=1e-12 * np.abs(want).max())  # another order of sums


@pytest.mark.parametrize(
    "case",
    ["gqa", "tied_mqa_72", "head_dim", "rope_linear", "rope_llama3", "attention_bias", "relu_odd"],
)
@pytest.mark.parametrize("kind", ["safetensors", "sharded", "bin"])
def test_models_of_transformers(tmp_path, case, kind):
    """A float64 forward pass over the F32 file equals transformers' own in float64."""
    torch = pytest.importorskip("torch")
    checkpoints = pytest.importorskip("parity.checkpoints")
    model = checkpoints.tiny_model(case)
    folder = tmp_path / "model"
    model.save_pretrained(folder, max_shard_size="100KB" if kind == "sharded" else "50GB")
    checkpoints.write_bpe_tokenizer(folder, model.config.vocab_size)
    if kind == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    assert (kind == "sharded") == (folder / "model.safetensors.index.json").exists()
    output = tmp_path / "out.gguf"
    prepare(ConvertSettings(str(folder), output, OutType.F32)).write()
    tokens = list(range(3, 43))
    want = checkpoints.torch_logits(model.double(), tokens)
    got = Reference.load(output).logits(tokens)
    # The keys hold eps and the rope base in float32, and transformers rotates in float32:
    # relative 6e-8 x positions up to 40, through two layers.
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < 1e-5
