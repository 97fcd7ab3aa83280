"""Write the model for runtime/native/tests/stress.cpp: python stress_model.py OUT.gguf."""

from __future__ import annotations

import sys
from pathlib import Path

from parity.synthetic import Shape, random_weights, write_gguf

SHAPE = Shape(n_ff=512, ranks=(8, 12))

if __name__ == "__main__":
    write_gguf(
        Path(sys.argv[1]), SHAPE, random_weights(SHAPE, 0), keys={"powerinfer.activation": "relu"}
    )
