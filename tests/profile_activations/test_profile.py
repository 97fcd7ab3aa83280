"""pi-profile against a plain count of every activation; batches, BOS, thresholds, resuming (about 8 s)."""

import json
import shutil

import numpy as np
import pytest
import torch

from parity.checkpoints import load_checkpoint
from parity.sparse_checkpoint import blocks_of
from powerinfer_toolkit.profile_activations import profile as profile_module
from powerinfer_toolkit.profile_activations.device_tally import DeviceTally
from powerinfer_toolkit.profile_activations.settings import ProfileSettings
from powerinfer_toolkit.statistics import FILE_NAME, ActivationStatistics, Tally

NEAR_ZERO = 1e-5  # float32 products of a tiny model's gates differ from float64 by about 1e-6


def plain_activations(folder, tokens, threshold=0.0):
    """act(gate) * up [n_layers, n_positions, n_ff] in float64 from the inputs that transformers gives the FFN,
    and which gates are too near the threshold to tell."""
    model = load_checkpoint(folder).double()
    inputs = []
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Threshold(threshold, 0.0)
        layer.mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0].numpy()))
    with torch.no_grad():
        model(torch.as_tensor(tokens[None].astype(np.int64)))
    activations, unsure = [], []
    for layer, x in zip(model.model.layers, inputs, strict=True):
        gate, up = (
            x @ w.weight.detach().numpy().T for w in (layer.mlp.gate_proj, layer.mlp.up_proj)
        )
        activations.append(np.where(gate > threshold, gate, 0.0) * up)
        unsure.append(np.abs(gate - threshold) < NEAR_ZERO)
    return np.stack(activations), np.stack(unsure)


def check_counts(statistics, folder, blocks, threshold=0.0):
    counts, doubt, tokens = 0, 0, 0
    for block in blocks:
        activations, unsure = plain_activations(folder, block, threshold)
        counts = counts + (activations[:, 1:] != 0).sum(axis=1)
        doubt = doubt + unsure[:, 1:].sum(axis=1)
        tokens += block.size - 1
    assert statistics.n_tokens == tokens
    assert (np.abs(statistics.tally.counts - counts) <= doubt).all()
    assert np.sum(doubt) < 100  # of 72,000 and more: the comparison says something


def counted_blocks(folder, n_blocks=None):
    """The blocks that pi-profile counts, in its order: documents are shuffled, then blocks."""
    import transformers

    from powerinfer_toolkit.training.blocks import TokenStore, TrainingBlocks, text_encoder
    from powerinfer_toolkit.training.sources import DataSource

    encoder = text_encoder(transformers.AutoTokenizer.from_pretrained(folder), None)
    sources = [DataSource(path=f"{folder}/text.jsonl")]
    settings = ProfileSettings(dataset_mixture=sources, max_length=64)
    store = TokenStore(settings, encoder, folder / "tokens")
    store.make()
    blocks = TrainingBlocks(store, n_blocks)
    return blocks.rows(range(len(blocks)))


def test_the_text_is_the_documents_block_by_block(sparse_checkpoint):
    counted = {tuple(row) for row in counted_blocks(sparse_checkpoint).tolist()}
    written = {tuple(row) for row in blocks_of(sparse_checkpoint).tolist()}
    assert counted <= written
    assert len(counted) > 0.9 * len(written)


def test_counts_equal_a_plain_count(profiled, sparse_checkpoint):
    statistics = profiled("--max_tokens", 640, "--per_device_batch_size", 3)
    check_counts(statistics, sparse_checkpoint, counted_blocks(sparse_checkpoint, 10))
    assert statistics.manifest.origins["weights"].name == "tiny"
    assert statistics.manifest.origins["text_0"].name == "text.jsonl"


def test_batch_size_does_not_matter(profiled):
    one = profiled("--per_device_batch_size", 1, name="one")
    many = profiled("--per_device_batch_size", 7, name="many")
    for name, array in one.tally.arrays().items():
        # batched products round differently: a gate within 1e-6 of 0 may open or close
        assert np.abs(array - many.tally.arrays()[name]).sum() <= 5, name


def test_bos_does_not_count(sparse_checkpoint, tmp_path, pi_profile, write_texts):
    """A tokenizer that begins texts with BOS has it at position 0 of blocks; elsewhere it is left out."""
    folder = shutil.copytree(sparse_checkpoint, tmp_path / "tiny")
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    document = "a" * 10 + "<s>" + "b" * 29 + "<s>" + "c" * 22  # 63 tokens, and the separator
    sources = json.dumps(write_texts([document] * 3))
    flags = ("--dataset_mixture", sources, "--max_length", 64, "--held_out_share", 1e-9)
    assert pi_profile(folder, tmp_path / "out", *flags) == 0
    statistics = ActivationStatistics.load(tmp_path / "out")
    assert statistics.n_tokens == 3 * 61
    assert statistics.tally.windows[0] == 3 * (31 - 2)  # (9, 10) and (39, 40) have a BOS
    (tokens,) = (tmp_path / "out" / "tokens").glob("*.train.npy")
    block = np.load(tokens)[0].astype(np.int64)
    assert block[[10, 40]].tolist() == [1, 1]
    block[0] = 1
    activations, unsure = plain_activations(folder, block)
    counted = np.isin(np.arange(64), [0, 10, 40], invert=True)
    counts = 3 * (activations[:, counted] != 0).sum(axis=1)
    assert (np.abs(statistics.tally.counts - counts) <= 3 * unsure.sum(axis=1)).all()


@pytest.mark.parametrize("key", ["activation_threshold", "hidden_act_param"])
def test_a_threshold_in_the_configuration_counts(
    sparse_checkpoint, tmp_path, pi_profile, text_flags, key
):
    folder = shutil.copytree(sparse_checkpoint, tmp_path / "tiny")
    config = json.loads((folder / "config.json").read_text()) | {key: 0.2}
    if key == "hidden_act_param":
        config["hidden_act"] = "fatrelu"  # as ProSparse's checkpoints have it
    (folder / "config.json").write_text(json.dumps(config))
    assert (
        pi_profile(folder, tmp_path / "out", *text_flags, "--max_length", 64, "--max_tokens", 128)
        == 0
    )
    if key == "hidden_act_param":
        (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    statistics = ActivationStatistics.load(tmp_path / "out")
    check_counts(statistics, folder, counted_blocks(folder, 2), threshold=0.2)


class Killed(BaseException):
    """What no handler of errors catches."""


def stop_after(monkeypatch, n_batches):
    observe, seen = DeviceTally.observe, []

    def killed_later(self, *arguments):
        if len(seen) == n_batches:
            raise Killed
        seen.append(1)
        observe(self, *arguments)

    monkeypatch.setattr(profile_module.DeviceTally, "observe", killed_later)
    return lambda: monkeypatch.setattr(profile_module.DeviceTally, "observe", observe)


def test_an_interrupted_run_resumes(profiled, monkeypatch, tmp_path):
    flags = ("--per_device_batch_size", 2, "--save_steps", 2)
    whole = profiled(*flags, name="whole")
    revive = stop_after(monkeypatch, 7)
    with pytest.raises(Killed):
        profiled(*flags)
    assert not (tmp_path / "out" / FILE_NAME).exists()
    revive()
    resumed = profiled(*flags)
    for name, array in whole.tally.arrays().items():
        np.testing.assert_array_equal(resumed.tally.arrays()[name], array)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [FILE_NAME, "tokens"]


def test_other_settings_do_not_resume(
    profiled, monkeypatch, tmp_path, pi_profile, capsys, sparse_checkpoint, text_flags
):
    stop_after(monkeypatch, 3)
    with pytest.raises(Killed):
        profiled("--per_device_batch_size", 2, "--save_steps", 1)
    flags = (*text_flags, "--max_length", 64, "--per_device_batch_size", 3)
    assert pi_profile(sparse_checkpoint, tmp_path / "out", *flags) == 1
    assert "a run with other settings" in capsys.readouterr().err


def test_memory_does_not_grow_with_the_text(sparse_checkpoint):
    """What is kept between batches is one array a quantity, of a size that the model gives."""
    from powerinfer_toolkit.training.checkpoint import load_sparse_model

    tally = DeviceTally(load_sparse_model(str(sparse_checkpoint), device=torch.device("cpu")))
    tokens = torch.from_numpy(blocks_of(sparse_checkpoint)[:2].astype(np.int64))
    for _ in range(3):
        tally.observe(tokens, torch.ones_like(tokens, dtype=torch.bool))
    sizes = {name: array.shape for name, array in tally.tally().arrays().items()}
    assert sizes == {name: array.shape for name, array in Tally.zeros(3, 160).arrays().items()}


def test_upstreams_files(profiled, tmp_path):
    statistics = profiled("--upstream", "--max_tokens", 640)
    for layer in range(3):
        tensor = torch.load(tmp_path / "out" / "activation" / f"activation_{layer}.pt")
        assert tensor.tolist() == statistics.tally.counts[layer].tolist()


def test_both_branches_of_drelu_count(sparse_checkpoint, tmp_path, pi_profile, text_flags, capsys):
    """pi-relufy's dReLU checkpoints bring their code, which runs only if that is asked for."""
    from powerinfer_toolkit.convert.relufy import variants
    from powerinfer_toolkit.convert.relufy.bamboo.modeling_bamboo import BambooForCausalLM

    folder = shutil.copytree(sparse_checkpoint, tmp_path / "drelu")
    relu = load_checkpoint(sparse_checkpoint)
    model = BambooForCausalLM(variants._bamboo_config(relu.config))
    model.load_state_dict(relu.state_dict())
    variants.save_checkpoint(model, model.state_dict(), folder, dtype=torch.float32, threshold=0.0)
    flags = (*text_flags, "--max_length", 64, "--max_tokens", 128)
    assert pi_profile(folder, tmp_path / "out", *flags) == 1
    assert "trust_remote_code" in capsys.readouterr().err
    assert pi_profile(folder, tmp_path / "out", *flags, "--trust_remote_code") == 0
    zeros = ActivationStatistics.load(tmp_path / "out").zero_share()
    assert pi_profile(sparse_checkpoint, tmp_path / "relu", *flags) == 0
    relu_zeros = ActivationStatistics.load(tmp_path / "relu").zero_share()
    # the gate is open in the first layer as before; up is positive half the time
    assert 1 - zeros[0] == pytest.approx((1 - relu_zeros[0]) / 2, rel=0.2)


@pytest.mark.parametrize("what", ["config.json", "model.safetensors", "tokenizer.json"])
def test_damaged_checkpoints_are_refused(
    sparse_checkpoint, tmp_path, pi_profile, text_flags, capsys, what
):
    folder = shutil.copytree(sparse_checkpoint, tmp_path / "damaged")
    (folder / what).write_bytes(b"{" + (folder / what).read_bytes()[:200])
    assert pi_profile(folder, tmp_path / "out", *text_flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "damaged" in error
