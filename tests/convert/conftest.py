"""Tiny random checkpoints made with numpy alone, and conversions of them read back with gguf-py."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from parity.gguf_file import GgufFile
from powerinfer_toolkit.convert.cli import main
from powerinfer_toolkit.convert.conversion import prepare
from powerinfer_toolkit.convert.outtypes import OutType
from powerinfer_toolkit.convert.settings import ConvertSettings

RUN = "import sys; from powerinfer_toolkit.convert.cli import main; sys.exit(main(sys.argv[1:]))"
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
UPSTREAM = {"hidden_act": "relu", "intermediate_size": 1024, "hidden_size": 32}


@dataclass
class TinyCheckpoint:
    path: Path
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]  # float32, exactly representable in bfloat16 and float16

    @property
    def n_layers(self) -> int:
        return self.config["num_hidden_layers"]

    @property
    def n_ff(self) -> int:
        return self.config["intermediate_size"]

    @property
    def n_embd(self) -> int:
        return self.config["hidden_size"]


def short_floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random float32 with 8 significant bits: bfloat16 and float16 hold them exactly."""
    bits = rng.normal(size=shape).astype(np.float32).view(np.uint32) & 0xFFFF0000
    return np.where(np.abs(bits.view(np.float32)) < 2**-6, 0.5, bits.view(np.float32)).astype("f4")


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    n_embd, n_ff = config["hidden_size"], config["intermediate_size"]
    n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", n_embd // n_heads)
    n_q, n_kv = n_heads * head_dim, n_kv_heads * head_dim
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], n_embd),
        "model.norm.weight": (n_embd,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], n_embd)
    outputs = {"q": n_q, "k": n_kv, "v": n_kv}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (n_embd,)
        shapes[prefix + "post_attention_layernorm.weight"] = (n_embd,)
        for which, size in outputs.items():
            shapes[prefix + f"self_attn.{which}_proj.weight"] = (size, n_embd)
            if config.get("attention_bias"):
                shapes[prefix + f"self_attn.{which}_proj.bias"] = (size,)
        shapes[prefix + "self_attn.o_proj.weight"] = (n_embd, n_q)
        if config.get("attention_bias"):
            shapes[prefix + "self_attn.o_proj.bias"] = (n_embd,)
        for which in ("gate", "up"):
            shapes[prefix + f"mlp.{which}_proj.weight"] = (n_ff, n_embd)
        shapes[prefix + "mlp.down_proj.weight"] = (n_embd, n_ff)
    return shapes


def encode_source(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8"}[dtype]).tobytes()


def write_safetensors(
    path: Path, tensors: dict[str, np.ndarray], dtype: str = "F32", metadata: Any = None
) -> None:
    """The format by its specification, bfloat16 included, which safetensors' numpy API cannot write."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    chunks, offset = [], 0
    for name, values in tensors.items():
        chunk = encode_source(values, dtype)
        end = offset + len(chunk)
        header[name] = {
            "dtype": dtype,
            "shape": list(values.shape),
            "data_offsets": [offset, end],
        }
        chunks.append(chunk)
        offset = end
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def write_tokenizer(folder: Path) -> None:
    specials = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet, "th", "he"])}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[("t", "h"), ("h", "e")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_checkpoint(
    folder: Path, changes: dict[str, Any] | None = None, dtype: str = "F32"
) -> TinyCheckpoint:
    folder.mkdir(parents=True, exist_ok=True)
    config = TINY | (changes or {})
    rng = np.random.default_rng(0)
    tensors = {name: short_floats(rng, *shape) for name, shape in shapes_of(config).items()}
    for name, values in tensors.items():
        if values.ndim == 2 and "embed" not in name:
            values *= 0.125  # keeps activations near 1, and the bits short
    write_safetensors(folder / "model.safetensors", tensors, dtype)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return TinyCheckpoint(folder, config, tensors)


def write_hollow(folder: Path, changes: dict[str, Any]) -> Path:
    """A checkpoint in bfloat16 whose weights are a hole in the file: zeros that take no space."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TINY | changes
    header, offset = {}, 0
    for name, shape in shapes_of(config).items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


@pytest.fixture
def hollow_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """hollow_checkpoint(changes to TINY) writes one without data and returns its directory."""
    return lambda changes: write_hollow(tmp_path / "hollow", changes)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., TinyCheckpoint]:
    """checkpoint(changes to TINY, dtype) writes one and says what is in it."""

    def make(
        changes: dict[str, Any] | None = None, dtype: str = "F32", name: str = "tiny"
    ) -> TinyCheckpoint:
        return write_checkpoint(tmp_path / name, changes, dtype)

    return make


@pytest.fixture(scope="module")
def slow_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a checkpoint that takes seconds to be written in K types."""
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 4}
    return write_checkpoint(tmp_path_factory.mktemp("slow") / "slow", sizes).path


@pytest.fixture
def converted(tmp_path: Path) -> Callable[..., GgufFile]:
    """converted(checkpoint, setting=...) writes out.gguf and opens it with gguf-py."""

    def convert(source: TinyCheckpoint, **settings: Any) -> GgufFile:
        output = settings.pop("output", tmp_path / "out.gguf")
        if "outtype" in settings:
            settings["outtype"] = OutType(settings["outtype"])
        prepare(ConvertSettings(str(source.path), output, **settings)).write()
        return GgufFile(output)

    return convert


@pytest.fixture
def predictor_dir(tmp_path: Path) -> Callable[..., Path]:
    """Predictors of rank 32 + 8 * layer as safetensors; `threshold` goes to their config.json."""

    def make(source: TinyCheckpoint, threshold: float | None = None) -> Path:
        folder = tmp_path / "predictors"
        folder.mkdir()
        rng = np.random.default_rng(1)
        for layer in range(source.n_layers):
            rank = 32 + 8 * layer
            tensors = {
                "fc1.weight": short_floats(rng, rank, source.n_embd),
                "fc2.weight": short_floats(rng, source.n_ff, rank),
            }
            write_safetensors(folder / f"model_{layer}.safetensors", tensors)
        if threshold is not None:
            (folder / "config.json").write_text(json.dumps({"sparse_threshold": threshold}))
        return folder

    return make


@pytest.fixture
def counts_file(tmp_path: Path) -> Callable[..., Path]:
    """A .npy of random counts [n_layers, n_ff], many of them equal."""

    def make(source: TinyCheckpoint, most: int = 50) -> Path:
        counts = np.random.default_rng(2).integers(0, most, (source.n_layers, source.n_ff))
        path = tmp_path / "counts.npy"
        np.save(path, counts)
        return path

    return make


@pytest.fixture
def pi_convert(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """pi_convert(*arguments) -> exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def listing(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in sorted(folder.rglob("*"))}


def check_refusal(code: int, err: str, want: int) -> None:
    assert code == want, err
    for label in ("error: ", "hint: "):
        assert len([line for line in err.splitlines() if line.startswith(label)]) == 1, err
    assert "Traceback" not in err


@pytest.fixture
def refused(pi_convert: Callable[..., tuple[int, str, str]], tmp_path: Path) -> Callable[..., str]:
    """refused(arguments..., code=1) -> stderr: one error, one hint, nothing on stdout or on the disk."""

    def run(*arguments: object, code: int = 1) -> str:
        before = listing(tmp_path)
        got, out, err = pi_convert(*arguments)
        check_refusal(got, err, code)
        assert out == ""
        assert listing(tmp_path) == before
        return err

    return run


@pytest.fixture
def child_refused(tmp_path: Path) -> Callable[..., str]:
    """As refused(), in a process of its own; `prelude` is Python to run before, options are subprocess.run's."""

    def run(*arguments: object, prelude: str = "", **options: Any) -> str:
        before = listing(tmp_path)
        command = [sys.executable, "-c", prelude + RUN, *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120, **options
        )
        check_refusal(done.returncode, done.stderr, 1)
        assert listing(tmp_path) == before
        return done.stderr

    return run


@pytest.fixture
def model(
    checkpoint: Callable[..., TinyCheckpoint],
    converted: Callable[..., GgufFile],
    predictor_dir: Callable[..., Path],
    tmp_path: Path,
) -> Path:
    """A small sparse model file with predictors, in the extended dialect."""
    source = checkpoint({"hidden_act": "relu", "num_hidden_layers": 1, "vocab_size": 262})
    path = tmp_path / "model.gguf"
    converted(source, output=path, predictors=predictor_dir(source), outtype="q4_0")
    return path


@pytest.fixture
def write_tensors() -> Callable[..., None]:
    """write_tensors(path, {name: array}, dtype, metadata) writes a safetensors file."""
    return write_safetensors


@pytest.fixture
def rewrite() -> Callable[..., None]:
    """rewrite(checkpoint, name, index, value) changes one weight of its file."""

    def change(source: TinyCheckpoint, name: str, index: Any, value: float) -> None:
        source.tensors[name][index] = value
        write_safetensors(source.path / "model.safetensors", source.tensors)

    return change
