"""llama.cpp's tokenizer, through the local server of xllamacpp, in a process of its own.

python llama_cpp_tokens.py MODEL < '{"texts": [...], "parse_special": true}' > '[[1, 2], ...]'
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from parity.llama_cpp import open_server


def tokenize(address: str, text: str, parse_special: bool) -> list[int]:
    content = {"content": text, "add_special": True, "parse_special": parse_special}
    request = urllib.request.Request(
        f"{address}/tokenize", json.dumps(content).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        tokens: list[int] = json.load(answer)["tokens"]
    return tokens


if __name__ == "__main__":
    wanted = json.load(sys.stdin)
    server = open_server(sys.argv[1])
    found = [
        tokenize(server.listening_address, text, wanted["parse_special"])
        for text in wanted["texts"]
    ]
    json.dump(found, sys.stdout)
