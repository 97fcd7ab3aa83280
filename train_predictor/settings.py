"""What pi-train-predictor can be told."""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.settings import setting
from powerinfer_toolkit.training.sources import DataSource, check_seed, check_sources

DTYPES = ("auto", "float32", "bfloat16", "float16")
GRADIENT, CONTRIBUTION, UNIFORM = LOSSES = ("gradient", "contribution", "uniform")
RANDOM, SVD = INITS = ("random", "svd")
_MAY_BE_ZERO = ("seed", "num_train_epochs")


@dataclass(frozen=True)
class PredictorSettings:
    """Settings of one training; docs/cli.md explains them, docs/predictors.md the method."""

    dataset_mixture: list[DataSource] = setting([], "sources to train on, see docs/training.md")
    eval_mixture: list[DataSource] = setting([], "held-out sources; none: documents held out")
    held_out_share: float = setting(
        0.01, "share of documents for thresholds and report, half of it for each"
    )
    separator_token: str | None = setting(None, "token after a document; none: end of text")
    max_length: int = setting(1024, "tokens of a block; documents are packed into blocks")
    token_dir: str | None = setting(None, "where tokenised text is kept; none: OUT/tokens")
    max_tokens: int = setting(13_000_000, "most tokens to train on")
    calibration_tokens: int = setting(131_072, "most tokens for the thresholds")
    test_tokens: int = setting(196_608, "most tokens for what is reported")
    moment_tokens: int = setting(262_144, "of them, tokens for the second moments of the inputs")
    torch_dtype: str = setting(
        "auto",
        "arithmetic of the model; auto is the checkpoint's own on a GPU (for float16 and gradients bfloat16), float32 "
        "elsewhere",
        choices=DTYPES,
    )
    trust_remote_code: bool = setting(
        False, "run modelling code that lies in the checkpoint's directory (dReLU models)"
    )
    per_device_batch_size: int = setting(16, "blocks that run through the model at a time")
    predictor_batch_tokens: int = setting(4096, "tokens of one step of the predictors in a process")
    learning_rate: float = setting(1e-2, "of Adam, falling to 0 along a cosine")
    num_train_epochs: int = setting(1, "passes over the text; 0 leaves the start as it is")
    seed: int = setting(0, "of initial weights and sampled labels")
    predictor_rank: list[int] = setting(
        [48],
        "ranks to train at once, from the same activations (a multiple of 32 can be quantised); of several the best is "
        "kept, one for all layers or one a layer, whichever reads fewer bytes",
    )
    predictor_budget: float = setting(0.1, "most predictor parameters, as a share of the FFN's")
    predictor_init: str = setting(
        RANDOM,
        "start: random, or the whitened singular vectors of the gate in pairs",
        choices=INITS,
    )
    predictor_loss: str = setting(
        GRADIENT,
        "cost of missing a neuron: gradient, half the squared product of activation and loss gradient in nats; "
        "contribution, |activation| * |down|, without a backward pass; uniform, plain cross-entropy",
        choices=LOSSES,
    )
    byte_price: float = setting(0.012, "price of reading a layer's whole FFN at a token, in nats")
    cost_clip: float = setting(300.0, "most that a miss costs, in prices of a neuron")
    layers_per_group: int | None = setting(
        None, "layers trained in one pass over the text, which bounds memory; none: all"
    )
    target_perplexity_loss: list[float] = setting(
        [0.03],
        "rise of the perplexity that the thresholds may cause, 0.03 is 3%; further values are measured only",
    )
    exact_layers: bool = setting(True, "leave layers exact where their predictor does not pay")
    upstream: bool = setting(
        False, "also write OUT/model_<layer>.pt, which PowerInfer's converter reads"
    )

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant (UsageError)."""
        for name, value in vars(self).items():
            numbers = value if isinstance(value, list) else [value]
            wrong = [n for n in numbers if isinstance(n, (int, float)) and not n > 0]
            if wrong and name not in _MAY_BE_ZERO and not isinstance(value, bool):
                raise UsageError(f"{name} is {wrong[0]}", hint="give a number above 0")
        check_sources(self.dataset_mixture, self.eval_mixture)
        check_seed(self.seed)
        for name in ("predictor_rank", "target_perplexity_loss"):
            if not getattr(self, name):
                raise UsageError(f"{name} is empty", hint="give at least one")
        if min(self.predictor_rank) < 2:
            raise UsageError(
                "a rank below 2 has no room beside the constant unit",
                hint="give a rank of 2 or more; multiples of 32 quantise",
            )
        if self.max_length < 2:
            raise UsageError(
                "blocks of one token hold nothing to predict", hint="give a max_length of 2 or more"
            )
