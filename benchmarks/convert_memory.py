"""Peak memory and time of pi-convert on a checkpoint of 7B shape (32000 x 4096 embeddings, n_ff 11008).

The checkpoint is a sparse file of zeros in bfloat16, so it takes no space; layers repeat, hence a few of them
show the peak of all 32. ReLU with activation counts is the costliest way: down is transposed and reordered.

    python benchmarks/convert_memory.py --layers 4 [--outtypes f16,q4_0] [--work DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tokenizers

N_EMBD, N_FF, N_VOCAB, N_HEADS = 4096, 11008, 32000, 32
LARGEST_BYTES = N_VOCAB * N_EMBD * 2
BUDGET_BYTES = (1 << 30) + 2 * LARGEST_BYTES
# The child says its own peak: what wait4 says of it begins with what its parent had in memory.
CONVERT = """
import sys
from powerinfer_toolkit.convert.cli import main
assert main(sys.argv[1:]) == 0
print(open("/proc/self/status").read())
"""


def shapes(n_layers: int) -> dict[str, tuple[int, ...]]:
    """Parameter name -> shape of an untied Llama without grouped heads."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (N_VOCAB, N_EMBD),
        "lm_head.weight": (N_VOCAB, N_EMBD),
        "model.norm.weight": (N_EMBD,),
    }
    for layer in range(n_layers):
        prefix = f"model.layers.{layer}."
        for which in "qkvo":
            found[f"{prefix}self_attn.{which}_proj.weight"] = (N_EMBD, N_EMBD)
        for which in ("gate", "up"):
            found[f"{prefix}mlp.{which}_proj.weight"] = (N_FF, N_EMBD)
        found[f"{prefix}mlp.down_proj.weight"] = (N_EMBD, N_FF)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{norm}.weight"] = (N_EMBD,)
    return found


def write_checkpoint(folder: Path, n_layers: int) -> None:
    """Write config, tokenizer, a sparse model.safetensors and counts.npy."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "relu",
        "hidden_size": N_EMBD,
        "intermediate_size": N_FF,
        "num_hidden_layers": n_layers,
        "num_attention_heads": N_HEADS,
        "vocab_size": N_VOCAB,
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    header, offset = {}, 0
    for name, shape in shapes(n_layers).items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)
    counts = np.random.default_rng(0).integers(1, 1000, (n_layers, N_FF))
    np.save(folder / "counts.npy", counts)


def convert(folder: Path, outtype: str) -> tuple[float, int]:
    """Return seconds and peak resident bytes of one conversion in a process of its own."""
    output = folder / "out.gguf"
    command = [sys.executable, "-c", CONVERT, str(folder), str(output), "-q", "--force"]
    command += ["--outtype", outtype, "--activations", str(folder / "counts.npy")]
    begin = time.perf_counter()
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - begin
    if child.returncode:
        sys.exit(f"pi-convert failed for {outtype}")
    output.unlink()
    peak = next(line for line in child.stdout.splitlines() if line.startswith("VmHWM:"))
    return seconds, int(peak.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2, help="layers of the checkpoint")
    parser.add_argument("--outtypes", default="f32,f16,bf16,q8_0,q4_0", help="types to convert to")
    parser.add_argument("--work", type=Path, help="directory for the files (default: temporary)")
    args = parser.parse_args()
    print(f"largest tensor {LARGEST_BYTES / 2**20:.0f} MiB, budget {BUDGET_BYTES / 2**20:.0f} MiB")
    with tempfile.TemporaryDirectory(dir=args.work) as name:
        write_checkpoint(Path(name), args.layers)
        n_parameters = sum(math.prod(shape) for shape in shapes(args.layers).values())
        for outtype in args.outtypes.split(","):
            seconds, peak_bytes = convert(Path(name), outtype)
            print(
                f"{outtype:5} {args.layers} layers  peak {peak_bytes / 2**20:6.0f} MiB  "
                f"{seconds:6.1f} s  {n_parameters / seconds / 1e6:6.0f} M parameters/s"
            )
            if peak_bytes > BUDGET_BYTES:
                sys.exit("above the budget")


if __name__ == "__main__":
    main()
