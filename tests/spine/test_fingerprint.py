"""The weights' fingerprint is the hash that pi-convert takes while it reads them (about 2 s)."""

import json

import pytest

from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.settings import ConvertSettings
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.fingerprint import weights_sha256

torch = pytest.importorskip("torch")

from parity.checkpoints import save_checkpoint, tiny_model  # noqa: E402
from parity.gguf_file import GgufFile  # noqa: E402


def converted_hash(folder):
    output = folder.parent / "out.gguf"
    prepare(ConvertSettings(str(folder), output, force=True)).write()
    return GgufFile(output).key("powerinfer.source.sha256")


@pytest.mark.parametrize("case", ["gqa", "tied_mqa_72", "attention_bias"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_equals_the_converters_hash(tmp_path, case, dtype):
    model = tiny_model(case).to(getattr(torch, dtype))
    folder = save_checkpoint(model, tmp_path / "tiny")
    whole = weights_sha256(folder)
    assert whole == converted_hash(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert weights_sha256(tmp_path / "shards") == whole


def test_another_weight_is_another_hash(tmp_path):
    model = tiny_model("gqa")
    before = weights_sha256(save_checkpoint(model, tmp_path / "a"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1.0
    assert weights_sha256(save_checkpoint(model, tmp_path / "b")) != before


def test_torch_files_have_none(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert weights_sha256(tmp_path) == ""


def test_a_short_file_is_refused(tmp_path):
    folder = save_checkpoint(tiny_model("gqa"), tmp_path / "tiny")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(PiError, match="cut short"):
        weights_sha256(folder)
