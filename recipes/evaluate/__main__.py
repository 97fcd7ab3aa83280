"""lm_eval with the model `powerinfer`: for releases of lm-evaluation-harness that know no plugins (0.4.13).

    python -m powerinfer_toolkit.recipes.evaluate --model powerinfer --model_args path=model.gguf --tasks ...

Every argument is lm_eval's own. Later releases find the model by its entry point, without this.
"""

from __future__ import annotations

import sys

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import ExitCode, PiError

NAME = "powerinfer"
TARGET = "powerinfer_toolkit.recipes.evaluate.model:PowerInferLM"


def main() -> int:
    """Register the model, then do what lm_eval does; failures of this toolkit become `error:` lines."""
    try:
        import lm_eval.models  # noqa: F401 - fills the registry, which is then not filled again
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as failure:
        console.error(f"lm_eval is missing: {failure}", "pip install 'powerinfer-toolkit[eval]'")
        return ExitCode.FAILURE
    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)
    try:
        cli_evaluate()
    except PiError as failure:
        console.error(failure.message, failure.hint)
        return failure.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
