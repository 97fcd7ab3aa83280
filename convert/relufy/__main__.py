"""`accelerate launch -m powerinfer_toolkit.convert.relufy --config CONFIG.yaml`."""

import sys

from powerinfer_toolkit.convert.relufy.cli import main

if __name__ == "__main__":
    sys.exit(main())
