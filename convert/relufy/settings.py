"""The keys of pi-relufy, in the flat style of alignment-handbook, and what can be checked without a model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.settings import setting
from powerinfer_toolkit.training.sources import DataSource, check_seed, check_sources


class Variant(StrEnum):
    """What becomes of the FFN: relu on the gate, the same above a threshold, relu on gate and up, nothing.

    Nothing is for a control: the same data and losses without a sparsity term.
    """

    REGLU = "reglu"
    FATRELU = "fatrelu"
    DRELU = "drelu"
    DENSE = "dense"


class Schedule(StrEnum):
    """How the weight of the sparsity term is chosen."""

    ADAPTIVE = "adaptive"
    STAGES = "stages"


@dataclass(frozen=True)
class Stage:
    """One row of a stage table: the weight rises on a half-sine to `peak` at `until_step`."""

    peak: float = setting(0.0, "weight of the sparsity term at the stage's end")
    until_step: int = setting(0, "step at which the stage ends")


@dataclass(frozen=True)
class RelufySettings:
    """Every key of pi-relufy."""

    model_name_or_path: str = setting("", "dense model: directory, or hub id (ID or ID@REVISION)")
    output_dir: str = setting("", "directory for the checkpoint and the state of the run")
    variant: str = setting("reglu", "what to make of the FFN", choices=tuple(Variant))
    teacher_model_name_or_path: str | None = setting(None, "teacher; none: the dense model itself")
    attn_implementation: str = setting("sdpa", "attention of transformers: sdpa, eager, ...")
    bf16: bool | None = setting(None, "bfloat16 autocast; none: where the device has it")
    save_dtype: str = setting(
        "auto",
        "type of the saved weights; auto: the dense model's",
        choices=("auto", "float32", "float16", "bfloat16"),
    )

    dataset_mixture: list[DataSource] = setting([], "sources to train on, see docs/training.md")
    eval_mixture: list[DataSource] = setting([], "held-out sources; none: documents held out")
    held_out_share: float = setting(0.01, "share of documents that no training sees")
    eval_blocks: int = setting(64, "blocks for held-out perplexity, and as many to calibrate on")
    max_length: int = setting(1024, "tokens a block; documents are packed into blocks")
    separator_token: str | None = setting(None, "token after a document; none: end of text")
    streaming: bool = setting(False, "read while training, for data that memory cannot hold")
    shuffle_buffer: int = setting(1000, "documents in the shuffling buffer of a stream")
    token_dir: str | None = setting(None, "where tokenised data is kept; none: output_dir/tokens")
    seed: int = setting(0, "seed of data order and of dropout")

    ce_weight: float = setting(0.5, "weight of the cross-entropy")
    kl_weight: float = setting(0.5, "weight of the KL divergence from the dense teacher")
    distill_temperature: float = setting(1.0, "temperature of teacher and student in the KL term")
    loss_chunk_mib: int = setting(256, "most MiB of logits in float32 at once")

    sparsity_target: float | None = setting(None, "zero share to steer to; none: no sparsity term")
    sparsity_concavity: float = setting(
        0.0, "0: L1 of the contributions; above: log penalty, milder on large ones"
    )
    sparsity_schedule: str = setting("adaptive", "steered, or a table", choices=tuple(Schedule))
    sparsity_lambda_init: float = setting(2e-5, "first and least weight of the steered term")
    sparsity_lambda_step: float = setting(1.04, "factor by which steering moves it each step")
    sparsity_ramp_start: float = setting(
        0.12, "share of the run at which the target starts to rise"
    )
    sparsity_ramp_end: float = setting(0.70, "share of the run at which it reaches sparsity_target")
    sparsity_freeze: float = setting(0.80, "share of the run from which the weight stays")
    sparsity_stages: list[Stage] = setting([], "table of {peak, until_step} for stages (ProSparse)")

    activation_threshold: float | None = setting(None, "threshold of fatrelu; none: calibrated")
    perplexity_allowance: float = setting(0.01, "rise of perplexity that calibration may cost")

    use_peft: bool = setting(False, "train low-rank adapters and merge them at the end")
    lora_r: int = setting(32, "rank of the adapters")
    lora_alpha: float = setting(64.0, "scale of the adapters, times 1/lora_r")
    lora_dropout: float = setting(0.0, "dropout before the adapters")
    lora_target_modules: list[str] = setting(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "modules that get adapters",
    )

    learning_rate: float = setting(1e-3, "peak learning rate of AdamW")
    lr_scheduler_type: str = setting("cosine", "schedule of transformers")
    lr_scheduler_kwargs: dict[str, float] = setting({}, "arguments of the schedule")
    warmup_ratio: float = setting(0.05, "share of the steps to warm up in")
    weight_decay: float = setting(0.01, "weight decay of matrices")
    adam_beta1: float = setting(0.9, "first momentum")
    adam_beta2: float = setting(0.95, "second momentum")
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm")
    per_device_train_batch_size: int = setting(8, "blocks a device and a backward pass")
    gradient_accumulation_steps: int = setting(1, "backward passes a step")
    num_train_epochs: float = setting(1.0, "passes over the data, where max_steps is not given")
    max_steps: int = setting(-1, "optimiser steps; 0: only convert and calibrate")
    gradient_checkpointing: bool = setting(False, "recompute layers instead of keeping them")
    torch_compile: bool = setting(False, "compile layers and losses")
    cuda_graph: bool = setting(
        False, "replay a step as one CUDA graph, for small models on one GPU: several times faster"
    )

    logging_steps: int = setting(10, "steps between log lines")
    eval_steps: int = setting(100, "steps between held-out perplexities; 0: only at the end")
    save_steps: int = setting(100, "steps between checkpoints; 0: none")
    report_to: list[str] = setting(["none"], "trackers of transformers: tensorboard, wandb, ...")
    run_name: str | None = setting(None, "name of the run for trackers")


# What may change between an interruption and its continuation without changing a weight.
FREE_KEYS = {
    "output_dir",
    "token_dir",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "report_to",
    "run_name",
}


def check(settings: RelufySettings) -> None:
    """Refuse settings that contradict each other. Raises UsageError."""
    for key in ("model_name_or_path", "output_dir"):
        if not getattr(settings, key):
            raise UsageError(f"{key} is missing", hint=f"set it in the file or with --{key}")
    _check_ranges(settings)
    _check_sources(settings)
    _check_sparsity(settings)


def _check_ranges(settings: RelufySettings) -> None:
    not_negative = ("ce_weight", "kl_weight", "perplexity_allowance", "weight_decay")
    steps = ("eval_steps", "save_steps")
    for key in (*not_negative, *steps, "warmup_ratio", "sparsity_concavity", "learning_rate"):
        if getattr(settings, key) < 0:
            raise UsageError(f"{key} is {getattr(settings, key)}, below 0", hint="give 0 or more")
    positive = ("max_length", "per_device_train_batch_size", "gradient_accumulation_steps")
    for key in (*positive, "eval_blocks", "loss_chunk_mib", "logging_steps", "distill_temperature"):
        if getattr(settings, key) <= 0:
            raise UsageError(
                f"{key} is {getattr(settings, key)}, not above 0", hint="give a number above 0"
            )
    for key in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(settings, key) < 1:
            raise UsageError(
                f"{key} is {getattr(settings, key)}, not from 0 to below 1",
                hint="give a share, 0 for none",
            )
    check_seed(settings.seed)
    if settings.ce_weight + settings.kl_weight == 0:
        raise UsageError("ce_weight and kl_weight are both 0", hint="nothing would be learnt")
    if not 0 < settings.held_out_share < 1:
        raise UsageError(
            f"held_out_share is {settings.held_out_share}, not between 0 and 1",
            hint="0.02 keeps 2% of the documents for evaluation",
        )
    if settings.cuda_graph and settings.gradient_accumulation_steps != 1:
        raise UsageError(
            "cuda_graph goes with gradient_accumulation_steps 1 only",
            hint="use a larger per_device_train_batch_size, or cuda_graph: false",
        )
    if settings.cuda_graph and settings.attn_implementation != "sdpa":
        raise UsageError(
            "cuda_graph goes with attn_implementation sdpa only",
            hint="attn_implementation: sdpa, or cuda_graph: false",
        )
    if settings.max_steps < 0 and settings.num_train_epochs <= 0:
        raise UsageError(
            "neither max_steps nor num_train_epochs says how long to train", hint="give one of them"
        )


def _check_sources(settings: RelufySettings) -> None:
    check_sources(settings.dataset_mixture, settings.eval_mixture)
    weights = [source.weight for source in settings.dataset_mixture]
    if settings.streaming and settings.max_steps < 0:
        raise UsageError("streaming needs max_steps", hint="a stream's length is not known")
    if settings.streaming and len(weights) > 1 and None in weights:
        raise UsageError(
            "streaming several sources needs a weight for each",
            hint="give every source a weight, or streaming: false",
        )


def _check_sparsity(settings: RelufySettings) -> None:
    target, stages = settings.sparsity_target, settings.sparsity_stages
    if target is not None and not 0 < target < 1:
        raise UsageError(
            f"sparsity_target is {target}, not between 0 and 1", hint="0.9 asks for 90% zeros"
        )
    points = (settings.sparsity_ramp_start, settings.sparsity_ramp_end, settings.sparsity_freeze)
    if not 0 <= points[0] < points[1] <= 1 or not points[0] < points[2] <= 1:
        raise UsageError(
            "sparsity_ramp_start, sparsity_ramp_end and sparsity_freeze are out of order",
            hint="shares of the run: 0 <= ramp_start < ramp_end <= freeze <= 1",
        )
    if settings.sparsity_lambda_init <= 0 or settings.sparsity_lambda_step <= 1:
        raise UsageError(
            "sparsity_lambda_init must be above 0 and sparsity_lambda_step above 1",
            hint="the recipes in recipes/ have values that work",
        )
    if bool(stages) != (settings.sparsity_schedule == Schedule.STAGES):
        raise UsageError(
            f"sparsity_schedule is {settings.sparsity_schedule} and sparsity_stages has "
            f"{len(stages)} rows",
            hint="a table belongs to the schedule stages, and to no other",
        )
    steps = [0, *(stage.until_step for stage in stages)]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise UsageError(
            f"until_step of sparsity_stages does not rise: {steps[1:]}",
            hint="every stage ends at a later step than the one before",
        )
    if any(stage.peak < 0 for stage in stages):
        raise UsageError("sparsity_stages has a peak below 0", hint="give a peak of 0 or more")
