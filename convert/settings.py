"""What to convert and how: the command's options, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from powerinfer_toolkit.convert.dialect import RequestedDialect
from powerinfer_toolkit.convert.outliers import OUTLIER_RATIO
from powerinfer_toolkit.convert.outtypes import OutType
from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.gguf_format import Activation, NeuronOrder


@dataclass(frozen=True)
class ConvertSettings:
    """What to convert and how; None chooses by what is there: of a model file, what it is.

    `activation_tokens` is the number of tokens the counts were taken over, None: as their file says.
    `hidden_act` is the activation of a model file that does not say. ffn_down_t with a weight of `outlier_ratio`
    times its root mean square stays in 16 bits (convert/outliers.py); 0 quantises all.
    """

    source: str
    output: Path
    outtype: OutType | None = None
    dialect: RequestedDialect | None = None
    predictors: Path | None = None
    drop_predictors: bool = False
    activations: Path | None = None
    activation_tokens: int | None = None
    neuron_order: NeuronOrder | None = None
    imatrix: Path | None = None
    hidden_act: Activation | None = None
    outlier_ratio: float = OUTLIER_RATIO
    upstream_sidecar: bool = False
    allow_nonfinite: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        """Refuse options without what they need (UsageError)."""
        if self.activation_tokens is not None and self.activation_tokens < 1:
            raise UsageError("--activation-tokens must be positive", hint="leave it out if unknown")
        if not self.outlier_ratio >= 0:
            raise UsageError("--outlier-ratio must not be negative", hint="0 quantises all")
        if self.activations is None and self.activation_tokens is not None:
            raise UsageError("--activation-tokens needs --activations", hint="name the counts")
        if self.predictors is not None and self.drop_predictors:
            raise UsageError("--predictors and --no-predictors exclude each other", hint="take one")
        if self.is_file and self.imatrix is not None and self.outtype is None:
            raise UsageError("--imatrix needs --outtype", hint="types are kept without it")
        for option, given in (
            ("--hidden-act", self.hidden_act is not None),
            ("--no-predictors", self.drop_predictors),
        ):
            if given and not self.is_file:
                raise UsageError(
                    f"{option} is for GGUF sources", hint="a checkpoint says it in config.json"
                )

    @property
    def is_file(self) -> bool:
        """Whether the source is a model file, not a checkpoint."""
        return Path(self.source).is_file()
