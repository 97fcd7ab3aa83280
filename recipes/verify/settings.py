"""What pi-verify can be told."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.settings import setting
from powerinfer_toolkit.training.sources import DataSource, check_seed, check_sources

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATION_TYPES = ("q8_0", "f32")


@dataclass(frozen=True)
class VerifySettings:
    """Settings of one comparison; docs/cli.md explains them, docs/evaluation.md the limits."""

    file: str | None = setting(
        None, "UTF-8 text to measure on, instead of the sources below", short="-f"
    )
    dataset_mixture: list[DataSource] = setting(
        [],
        "sources of the training, whose held-out documents are measured on where eval_mixture is empty",
    )
    eval_mixture: list[DataSource] = setting(
        [], "held-out sources; the half that calibrates no predictors is measured on"
    )
    held_out_share: float = setting(0.01, "share of dataset_mixture that is held out")
    separator_token: str | None = setting(None, "token after a document; none: end of text")
    max_length: int = setting(512, "tokens of a window, the first of which is not predicted")
    token_dir: str | None = setting(None, "where tokenised text is kept; none: nowhere")
    seed: int = setting(0, "of the order of documents, as in training")
    max_tokens: int = setting(8192, "most tokens to measure on")
    predictors: str | None = setting(
        None,
        "directory of predictors, applied to the checkpoint's own weights: what pi-train-predictor "
        "measured, beside the file's",
    )
    activation_type: str | None = setting(
        None,
        "type of activations against quantised weights, as in pi-run (q8_0)",
        choices=ACTIVATION_TYPES,
    )
    check_source: bool = setting(
        True, "refuse a file that records the hash of other weights than the checkpoint's"
    )
    max_kl: float | None = setting(
        None,
        "most mean KL divergence of the file from the checkpoint, in nats; none: by the file's types",
    )
    threads: int | None = setting(None, "threads of both sides; none: physical cores")
    torch_dtype: str = setting("float32", "arithmetic of the checkpoint", choices=DTYPES)
    device: str | None = setting(
        None, "where the checkpoint runs: cpu, cuda, cuda:1 ...; none: a GPU where torch sees one"
    )
    trust_remote_code: bool = setting(
        False, "run modelling code that lies in the checkpoint's directory (dReLU models)"
    )

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant, and missing or contradictory texts (UsageError)."""
        for name in ("max_tokens", "held_out_share", "max_kl", "threads"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UsageError(f"{name} is {value}", hint="give a number above 0")
        check_seed(self.seed)
        if self.max_length < 2:
            raise UsageError(
                "windows of one token hold nothing to predict",
                hint="give a max_length of 2 or more",
            )
        sources = [*self.dataset_mixture, *self.eval_mixture]
        if (self.file is None) == (not sources):
            raise UsageError(
                "a file and sources exclude each other" if sources else "no text to measure on",
                hint="give -f FILE, or eval_mixture, or the dataset_mixture of the training",
            )
        if sources:
            check_sources(sources, [])
