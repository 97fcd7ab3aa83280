"""llama.cpp's log-probabilities of the token after each prompt, through xllamacpp's server.

Run as a process of its own (a file that llama.cpp cannot read may end it):
    python llama_cpp.py MODEL < '[[1, 2, 3], ...]' > '[[logprob of token 0, ...], null, ...]'
"""

from __future__ import annotations

import json
import sys
from typing import Any

import xllamacpp


def open_server(path: str) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 256
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = False
    params.verbosity = 0
    return xllamacpp.Server(params)


def next_logprobs(server: xllamacpp.Server, prompt: list[int]) -> list[float] | None:
    """[n_vocab] for the one token after `prompt`, which is taken as it is (no BOS is added); None where the
    likeliest token is half a UTF-8 character, of which the server says nothing."""
    n_all = 1_000_000
    request = {"prompt": prompt, "n_predict": 1, "temperature": 0, "ignore_eos": True}
    answer: Any = server.handle_completions(request | {"cache_prompt": False, "logprobs": n_all})
    if isinstance(answer, str):
        answer = json.loads(answer)
    logprobs = answer["choices"][0]["logprobs"]
    if logprobs is None:
        return None
    by_token = {entry["id"]: entry["logprob"] for entry in logprobs["content"][0]["top_logprobs"]}
    return [by_token[token] for token in range(len(by_token))]


if __name__ == "__main__":
    prompts = json.load(sys.stdin)
    server = open_server(sys.argv[1])
    json.dump([next_logprobs(server, prompt) for prompt in prompts], sys.stdout)
