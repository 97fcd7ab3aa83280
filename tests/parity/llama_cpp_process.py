"""llama_cpp.py beside this file, run in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("llama_cpp.py")


def run_llama_cpp(path: Path, prompts: list[list[int]]) -> subprocess.CompletedProcess[str]:
    """Ask llama.cpp for the log-probabilities after each prompt; stdout is JSON where it can read the model."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(path)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
