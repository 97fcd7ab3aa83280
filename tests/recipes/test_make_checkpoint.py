"""The checkpoint script against transformers' own reading of the same GGUF, weight by weight."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

from parity.synthetic import Shape, dense_layout, random_weights, uniform, write_gguf
from powerinfer_toolkit.recipes import __file__ as recipes_file

SCRIPT = Path(recipes_file).resolve().parent / "smollm2-135m" / "make_checkpoint.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with grouped heads, two layers and an untied head, in Q4_1."""
    shape = Shape()
    weights = dense_layout(random_weights(shape, 0))
    folder = tmp_path_factory.mktemp("gguf")
    type_of = uniform(GGMLQuantizationType.Q4_1)
    keys = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return write_gguf(folder / "model.gguf", shape, weights, type_of=type_of, keys=keys)


def test_float32_weights_are_those_transformers_reads(model: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    done = run(tmp_path / "out", "--gguf", model, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    load = transformers.AutoModelForCausalLM.from_pretrained
    options = {"dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    expected = load(model.parent, gguf_file=model.name, **options)
    found = load(tmp_path / "out", dtype=torch.float32)
    assert found.config.tie_word_embeddings is False
    assert found.config.rms_norm_eps == 1e-5
    assert found.config.num_key_value_heads == 2
    reference = expected.state_dict()
    assert found.state_dict().keys() == reference.keys()
    for name, values in found.state_dict().items():
        assert torch.equal(values, reference[name]), name
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(found(ids).logits, expected(ids).logits)


def test_float16_rounds_the_float32_values(model: Path, tmp_path: Path) -> None:
    for dtype in ("float16", "float32"):
        assert run(tmp_path / dtype, "--gguf", model, "--dtype", dtype).returncode == 0
    halves = load_file(tmp_path / "float16" / "model.safetensors")
    for name, values in load_file(tmp_path / "float32" / "model.safetensors").items():
        assert halves[name].dtype == np.float16
        assert np.array_equal(halves[name], values.astype(np.float16)), name
    config = json.loads((tmp_path / "float16" / "config.json").read_text())
    assert config["torch_dtype"] == "float16"
    tokenizer = json.loads((tmp_path / "float16" / "tokenizer_config.json").read_text())
    assert (tokenizer["bos_token"], tokenizer["add_bos_token"]) == ("<s>", True)


def test_refusals_leave_nothing_behind(model: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "bad.gguf").write_bytes(b"no GGUF at all")
    cases = {
        ("full", str(model)): (2, "not empty"),
        ("out", str(tmp_path / "bad.gguf")): (1, "not a GGUF file"),
        ("out", str(tmp_path / "missing.gguf")): (1, "missing.gguf"),
    }
    for (output, source), (code, message) in cases.items():
        done = run(tmp_path / output, "--gguf", source)
        assert done.returncode == code
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf", "full"]
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", "--gguf", model).returncode == 0
    assert (tmp_path / "empty" / "model.safetensors").is_file()
