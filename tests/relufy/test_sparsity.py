"""Zero shares, the penalty and the variants on a tiny model, against its own intermediate values."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: E402

from powerinfer_toolkit.convert.relufy import variants  # noqa: E402
from powerinfer_toolkit.convert.relufy.settings import RelufySettings  # noqa: E402
from powerinfer_toolkit.convert.relufy.sparsity import SparsityProbe, _measure, gated_mlps  # noqa: E402
from powerinfer_toolkit.errors import PiError, UsageError  # noqa: E402
from relufy import tiny  # noqa: E402

IDS = torch.randint(256, (3, 10), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("dense"))


def student(path, **changes):
    settings = RelufySettings(model_name_or_path=str(path), output_dir="unused", **changes)
    config = variants.student_config(settings, path)
    return settings, variants.load_model(path, config, torch.float32, "sdpa")


def down_inputs(model):
    """h of every layer from an independent hook."""
    found = []
    for mlp in gated_mlps(model):
        mlp.down_proj.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].detach()))
    return found


def test_reading_equals_plain_formulas(dense):
    _, model = student(dense)
    seen = down_inputs(model)
    probe = SparsityProbe(model)
    model(IDS)
    reading = probe.read()
    assert (reading.tokens, reading.neurons) == (30, 64)
    for layer, h in enumerate(seen):
        norms = model.model.layers[layer].mlp.down_proj.weight.double().norm(dim=0)
        penalty = (h.double().abs() * norms).sum()
        # float32 sums of 1920 terms, each rounded by 6e-8 relative
        torch.testing.assert_close(reading.penalty[layer].double(), penalty, rtol=1e-4, atol=0)
        assert reading.active[layer] == (h != 0).sum()
        assert (
            0.3 < 1 - reading.active[layer] / h.numel() < 0.7
        )  # a random gate is as often below 0


def test_soft_count_equals_its_formula(dense):
    _, model = student(dense)
    seen = down_inputs(model)
    probe = SparsityProbe(model, concavity=16)
    model(IDS)
    reading = probe.read()
    for layer, h in enumerate(seen):
        norms = model.model.layers[layer].mlp.down_proj.weight.double().norm(dim=0)
        c = h.double().abs() * norms
        means = c.sum(-1) / (c > 0).sum(-1)
        typical = means.log().mean().exp()
        penalty = torch.log1p(16 * c / typical).sum() / math.log(17)
        # float32 sums of 1920 terms, each rounded by 6e-8 relative
        torch.testing.assert_close(reading.penalty[layer].double(), penalty, rtol=1e-4, atol=0)
        assert 0 < penalty < 2 * reading.active[layer]  # a count, softly


def test_soft_count_spares_the_attention_sink():
    """A token of a thousand times the usual size moves the sum of magnitudes, not the soft count."""
    layer = torch.nn.Linear(8, 4, bias=False)
    h = torch.rand(1, 1000, 8).relu()
    with_sink = torch.cat([1000 * h[:, :1], h[:, 1:]], dim=1)

    def pull(hidden, concavity):
        hidden = hidden.clone().requires_grad_()
        _measure(layer, (hidden,), concavity=concavity)
        layer.__dict__.pop("measured")[0].sum().backward()
        return hidden.grad.norm(dim=-1)[0]

    torch.testing.assert_close(pull(with_sink, 0)[0], pull(h, 0)[0])
    assert pull(with_sink, 16)[0] < 0.01 * pull(h, 16)[0]
    # the scale is a geometric mean: log(1000) / 1000 of a change
    torch.testing.assert_close(pull(with_sink, 16)[1:], pull(h, 16)[1:], rtol=0.02, atol=0)


def test_no_gradient_reaches_down_proj(dense):
    _, model = student(dense)
    probe = SparsityProbe(model)
    model(IDS)
    probe.read().penalty[-1].backward()
    last = model.model.layers[-1].mlp
    assert last.down_proj.weight.grad is None
    assert last.up_proj.weight.grad.abs().sum() > 0


def test_rescaling_does_not_lower_the_penalty(dense):
    """A plain L1 falls when up is halved and down doubled; the function and this penalty stay."""
    _, model = student(dense)
    probe = SparsityProbe(model)
    before = model(IDS).logits, probe.read().penalty
    with torch.no_grad():
        for mlp in gated_mlps(model):
            mlp.up_proj.weight *= 0.5
            mlp.down_proj.weight *= 2
    after = model(IDS).logits, probe.read().penalty
    torch.testing.assert_close(after, before)  # powers of two: exact but for the order of sums


def test_checkpointed_layers_give_the_same_gradients(dense):
    gradients = []
    for checkpointed in (False, True):
        _, model = student(dense)
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        probe = SparsityProbe(model)
        model(IDS)
        probe.read().penalty.sum().backward()
        gradients.append(model.model.layers[0].mlp.gate_proj.weight.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_adapters_count_in_the_down_norm(dense):
    settings, model = student(dense, use_peft=True, lora_r=4, lora_alpha=8.0)
    pytest.importorskip("peft")
    adapted = variants.add_adapters(model, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    probe = SparsityProbe(model)
    adapted(IDS)
    with_adapters, logits = probe.read(), adapted(IDS).logits
    probe.remove()
    merged = adapted.merge_and_unload()
    probe = SparsityProbe(merged)
    # float32: merging adds the products before instead of after the sum over inputs
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(probe.read().penalty, with_adapters.penalty, rtol=1e-4, atol=1e-4)


def test_threshold_cuts_small_gates(dense):
    _, model = student(dense, variant="fatrelu")
    seen = down_inputs(model)
    variants.set_threshold(model, 0.05)
    gates = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *args: gates.append(args[2]))
    model(IDS)
    assert torch.equal(seen[0] != 0, gates[0] > 0.05)
    assert ((gates[0] > 0) & (gates[0] <= 0.05)).any()


def test_fatrelu_loads_with_stock_transformers(dense, tmp_path):
    _, model = student(dense, variant="fatrelu")
    state = model.state_dict()
    variants.save_checkpoint(model, state, tmp_path, dtype=torch.float32, threshold=0.05)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hidden_act"] == "relu"
    assert config["activation_threshold"] == 0.05
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(stock) is LlamaForCausalLM
    torch.testing.assert_close(stock(IDS).logits, model(IDS).logits, rtol=0, atol=0)


def test_drelu_brings_its_code(dense, tmp_path):
    """The checkpoint alone, through trust_remote_code, is the model; gate and up are both cut."""
    _, model = student(dense, variant="drelu")
    seen = down_inputs(model)
    logits = model(IDS).logits
    assert all((h >= 0).all() and (h == 0).float().mean() > 0.6 for h in seen)
    variants.save_checkpoint(
        model, model.state_dict(), tmp_path, dtype=torch.float32, threshold=0.0
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "bamboo"
    assert config["architectures"] == ["BambooForCausalLM"]
    assert config["auto_map"] == {
        "AutoConfig": "configuration_bamboo.BambooConfig",
        "AutoModelForCausalLM": "modeling_bamboo.BambooForCausalLM",
    }
    code = (tmp_path / "modeling_bamboo.py").read_text()
    assert "from .configuration_bamboo import BambooConfig" in code
    assert "powerinfer" not in code
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, trust_remote_code=True, dtype=torch.float32
    )
    assert type(loaded).__module__.startswith("transformers_modules")
    torch.testing.assert_close(loaded(IDS).logits, logits, rtol=0, atol=0)


@pytest.mark.parametrize("variant", ["reglu", "drelu"])
def test_relu_models_are_not_swapped_again(tmp_path, variant):
    path = tiny.write_model(tmp_path / "relu", hidden_act="relu")
    with pytest.raises(UsageError, match="is relu already"):
        student(path, variant=variant)


def test_biases_are_not_bamboo(tmp_path):
    path = tiny.write_model(tmp_path / "bias", attention_bias=True)
    with pytest.raises(PiError, match="attention_bias"):
        student(path, variant="drelu")
