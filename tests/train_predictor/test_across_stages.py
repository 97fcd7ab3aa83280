"""Predictors through pi-convert into the runtime: its masked logits are torch's (about 5 s)."""

import json
import shutil

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from parity.gguf_file import GgufFile
from parity.sparse_checkpoint import blocks_of
from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.outtypes import OutType
from powerinfer_toolkit.convert.settings import ConvertSettings
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.runtime import Model
from powerinfer_toolkit.runtime.doctor import examine
from powerinfer_toolkit.statistics import FILE_NAME
from powerinfer_toolkit.train_predictor.masking import masked, mean_loss
from powerinfer_toolkit.train_predictor.network import Predictor
from powerinfer_toolkit.train_predictor.output import write_predictors


def pack(source, output, predictors, **settings):
    prepare(
        ConvertSettings(
            str(source), output, outtype=OutType.F32, predictors=predictors, force=True, **settings
        )
    ).write()
    return GgufFile(output)


@pytest.fixture
def packed(train, statistics, sparse_checkpoint, tmp_path):
    """The directory of predictors and a hot-first float32 file with them."""
    statistics.save(tmp_path / FILE_NAME)
    folder = train().folder
    pack(sparse_checkpoint, tmp_path / "tiny.gguf", folder, activations=tmp_path / FILE_NAME)
    return folder, tmp_path / "tiny.gguf"


def test_what_was_measured_is_in_the_keys_and_in_doctors_words(packed, capsys):
    folder, path = packed
    config, file = json.loads((folder / "config.json").read_text()), GgufFile(path)
    for key in ("recall", "density", "perplexity_loss"):
        assert file.key(f"powerinfer.predictor.{key}") == pytest.approx(config[key], rel=1e-6)
    assert file.key("powerinfer.predictor.target") == "perplexity +3.0%, cost gradient"
    assert file.key("powerinfer.predictor.exact_layers") is None
    examine(str(path))
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("predictors")]
    assert f"recall {config['recall']:.2%}, density {config['density']:.2%}" in line
    assert f"perplexity {config['perplexity_loss']:+.2%}" in line


def torch_logprobs(model, predictors, tokens):
    """Log-probabilities of tokens[1:] under the masks that pi-train-predictor measures with."""
    ids = torch.from_numpy(tokens[None].astype(np.int64))
    with torch.no_grad(), masked(model, predictors):
        logits = model.model(ids).logits[0].log_softmax(-1)
    return logits[torch.arange(len(tokens) - 1), ids[0, 1:]].numpy()


def read_predictors(folder, exact_layers=(False, False, False)):
    from safetensors.torch import load_file

    found = []
    for layer, exact in enumerate(exact_layers):
        tensors = load_file(folder / f"model_{layer}.safetensors")
        predictor = Predictor(tensors["fc1.weight"], tensors["fc2.weight"])
        found.append(None if exact else predictor)
    return found


def check_logprobs(path, model, predictors, blocks):
    """The runtime's against torch's: equal but for neurons whose logit is within rounding of the threshold.

    Float32 sums of another order move logits by about 1e-6 of their size; of 64 * 480 logits a block, whose
    density near 0 is about 1 in units of their size, a block has such a neuron once in a few dozen.
    """
    with Model.load(path, ffn="predicted", batch=16) as runtime:
        ours = np.stack([runtime.score(block.tolist()) for block in blocks])
        exact = np.stack([_exact(runtime, block) for block in blocks])
    theirs = np.stack([torch_logprobs(model, predictors, block) for block in blocks])
    wrong = np.abs(ours - theirs) > 1e-4
    assert wrong.any(axis=1).mean() <= 0.15
    assert np.exp(-ours.mean()) == pytest.approx(np.exp(-theirs.mean()), rel=0.001)
    assert np.abs(exact - theirs).max() > 0.1  # the masks do something


def _exact(runtime, block):
    logits = runtime.logits(block.tolist())  # a prompt this long is computed exactly
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logprobs[np.arange(len(block) - 1), block[1:]]


def test_masked_logits_of_the_packed_file_are_torchs(packed, sparse_model, sparse_checkpoint):
    folder, path = packed
    blocks = blocks_of(sparse_checkpoint)[:20]
    check_logprobs(path, sparse_model, read_predictors(folder), blocks)


def test_exact_layers_stay_exact_everywhere(
    packed, sparse_model, sparse_checkpoint, tmp_path, capsys
):
    """Layer 1 exact: zeros in its file, true in the key, and the same masks in torch and in the runtime."""
    folder = shutil.copytree(packed[0], tmp_path / "predictors")
    exact = [False, True, False]
    predictors = read_predictors(folder, exact)
    write_predictors(folder, predictors, sparse_model.n_embd, sparse_model.n_ff, upstream=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"exact_layers": exact}))
    statistics = tmp_path / FILE_NAME
    path = tmp_path / "exact.gguf"
    file = pack(sparse_checkpoint, path, folder, activations=statistics)
    assert file.key("powerinfer.predictor.exact_layers") == exact
    assert not file.tensor("blk.1.fc2.weight").any()
    blocks = blocks_of(sparse_checkpoint)[:20]
    check_logprobs(path, sparse_model, predictors, blocks)
    examine(str(path))
    assert "1 layers stay exact" in capsys.readouterr().out
    again = pack(path, tmp_path / "again.gguf", None)  # a model file as the source
    assert again.key("powerinfer.predictor.exact_layers") == exact


def test_zeros_in_other_layers_are_refused(packed, sparse_model, sparse_checkpoint, tmp_path):
    folder = shutil.copytree(packed[0], tmp_path / "predictors")
    predictors = read_predictors(folder, [False, True, False])
    write_predictors(folder, predictors, sparse_model.n_embd, sparse_model.n_ff, upstream=False)
    with pytest.raises(PiError, match="all zero"):
        pack(sparse_checkpoint, tmp_path / "x.gguf", folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"exact_layers": [True]}, "exact_layers is not 3 times true or false"),
        ({"exact_layers": [0, 1, 0]}, "exact_layers is not 3 times true or false"),
        ({"recall": "high"}, "recall is 'high', not a finite number"),
        ({"source_sha256": "0" * 64}, "the predictors belong to weights 0000"),
    ],
)
def test_configurations_that_are_refused(packed, sparse_checkpoint, tmp_path, changes, said):
    folder = shutil.copytree(packed[0], tmp_path / "predictors")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(PiError, match=said):
        pack(sparse_checkpoint, tmp_path / "x.gguf", folder)


def test_exact_mode_is_the_unmasked_model(packed, sparse_model, sparse_checkpoint):
    blocks = blocks_of(sparse_checkpoint)[:8]
    with Model.load(packed[1], ffn="exact") as runtime:
        ours = -np.mean([runtime.score(block.tolist()).mean() for block in blocks])
    assert ours == pytest.approx(mean_loss(sparse_model, blocks, 4, Accelerator()), abs=1e-5)
