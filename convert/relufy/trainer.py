"""transformers' Trainer with our objective, steering, order of data and sealed checkpoints."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler
from tqdm import tqdm
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
    get_scheduler,
)
from transformers.integrations import get_reporting_integration_callbacks

from powerinfer_toolkit import artifact, console
from powerinfer_toolkit.convert.relufy import checkpoints, mixture
from powerinfer_toolkit.convert.relufy.evaluate import Evaluation, evaluate
from powerinfer_toolkit.convert.relufy.graphed import GraphedPass
from powerinfer_toolkit.convert.relufy.meter import Meter, check_gradients
from powerinfer_toolkit.convert.relufy.objective import Teacher
from powerinfer_toolkit.convert.relufy.settings import RelufySettings
from powerinfer_toolkit.convert.relufy.steering import Steering
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.training.blocks import Blocks


def training_arguments(settings: RelufySettings, n_steps: int, *, bf16: bool) -> TrainingArguments:
    """Return the settings in transformers' words."""
    cuda = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(Path(settings.output_dir) / "checkpoints"),
        run_name=settings.run_name,
        report_to=settings.report_to,
        seed=settings.seed,
        bf16=bf16,
        tf32=True if cuda else None,
        use_cpu=not cuda,
        max_steps=max(n_steps, 1),
        per_device_train_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_scheduler_type,
        lr_scheduler_kwargs=settings.lr_scheduler_kwargs,
        warmup_steps=math.ceil(settings.warmup_ratio * n_steps),
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        max_grad_norm=settings.max_grad_norm,
        logging_steps=settings.logging_steps,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if settings.eval_steps > 0 else "no",
        eval_steps=settings.eval_steps or None,
        save_strategy="steps" if settings.save_steps > 0 else "no",
        save_steps=settings.save_steps or 500,
        save_total_limit=None,  # checkpoints.seal drops old ones, once the new one is whole
        remove_unused_columns=False,
        dataloader_pin_memory=cuda,
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
    )
    if arguments.n_gpu > 1:  # the Trainer would split batches over threads, without accelerate
        console.info(f"using one of {arguments.n_gpu} GPUs; `accelerate launch` uses all")
        arguments._n_gpu = 1
    _check_names(arguments)
    return arguments


def _check_names(arguments: TrainingArguments) -> None:
    """Let transformers refuse trackers and schedules that it does not have (ValueError, TypeError)."""
    get_reporting_integration_callbacks(arguments.report_to)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        int(arguments.warmup_steps),
        arguments.max_steps,
        arguments.lr_scheduler_kwargs,
    )


class RelufyTrainer(Trainer):
    """Trains `model`, whose forward is a TrainingForward, at one pace with `steering`."""

    control: TrainerControl
    graph: GraphedPass | None

    def __init__(
        self,
        model: Any,  # noqa: ANN401
        args: TrainingArguments,
        data: Dataset[mixture.Sample],
        test_blocks: Blocks,
        steering: Steering,
        teacher: Teacher | None,
        *,
        cuda_graph: bool = False,
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            train_dataset=data,
            eval_dataset=test_blocks,  # only evaluate() below looks at it
            data_collator=mixture.collate,
        )
        self.test_blocks, self.steering, self.teacher = test_blocks, steering, teacher
        self.meter = Meter()
        self.cuda_graph, self.graph = cuda_graph, None
        self.model_accepts_loss_kwargs = False  # the loss is a mean, to be divided by the passes
        self.remove_callback(PrinterCallback)
        self.add_callback(_EveryStep(self))
        if self.is_world_process_zero():
            self.add_callback(_Progress())

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:  # noqa: ANN401
        """The data set is the order."""
        dataset: Any = train_dataset if train_dataset is not None else self.train_dataset
        return (
            SequentialSampler(dataset) if hasattr(dataset, "__len__") else None
        )  # a stream has none

    def compute_loss(
        self,
        model: Any,  # noqa: ANN401
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,  # noqa: ANN401 - every block has as many tokens
    ) -> Any:  # noqa: ANN401
        """Return the loss of one batch."""
        ids = inputs["input_ids"]
        parts = self._losses(model, ids, self.steering.weight)
        self.meter.add(parts, ids.numel())
        return (parts["loss"], parts) if return_outputs else parts["loss"]

    def _losses(
        self,
        model: Any,  # noqa: ANN401
        ids: Tensor,
        sparsity_weight: float | Tensor,
    ) -> dict[str, Tensor]:
        teacher_hidden = self.teacher.hidden(ids) if self.teacher is not None else None
        parts: dict[str, Tensor] = model(
            input_ids=ids, teacher_hidden=teacher_hidden, sparsity_weight=sparsity_weight
        )
        return parts

    def training_step(
        self,
        model: Any,  # noqa: ANN401
        inputs: dict[str, Any],
        num_items_in_batch: Any = None,  # noqa: ANN401
    ) -> Tensor:
        """Make the gradients of one batch and return its loss."""
        if not self.cuda_graph:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        ids: Tensor = self._prepare_inputs(inputs)["input_ids"]
        model.train()
        if self.graph is None:
            self.graph = GraphedPass(functools.partial(self._losses, model), model, ids)
        parts = self.graph.run(ids, self.steering.weight)
        self.meter.add(parts, ids.numel())
        return parts["loss"].clone()

    def measure(self, blocks: Blocks) -> Evaluation:
        """Evaluate the model as it is on blocks [n, max_length]."""
        model = self.model_wrapped
        was_training = model.training
        model.eval()
        found = evaluate(model, blocks, self.args.per_device_train_batch_size, self.args.device)
        model.train(was_training)
        return found

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:  # noqa: ANN401
        """Log and return held-out perplexity and zero share."""
        found = self.measure(self.test_blocks)
        metrics = {
            "eval_loss": found.loss,
            "eval_perplexity": found.perplexity,
            "eval_zero_share": found.zero_share,
        }
        self.log(dict(metrics))
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add loss parts, zero shares and steering to the Trainer's training line."""
        if "loss" in logs:
            logs |= self.meter.log(self.accelerator.num_processes)
            logs["lambda"] = self.steering.weight
            if self.steering.target is not None:
                logs["zero_share_target"] = self.steering.target
        super().log(logs, start_time)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ANN401
        with artifact.writing(Path(self.args.output_dir)):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            state = {"steering": self.steering.state_dict()}
            checkpoints.seal(folder, state | {"samples_a_step": self.samples_a_step})

    def resume(self, checkpoint: Path) -> None:
        """Train on from a sealed checkpoint. Raises PiError where the steps would have another size."""
        state = checkpoints.read_seal(checkpoint)
        if state["samples_a_step"] != self.samples_a_step:
            raise PiError(
                f"{checkpoint} was made with {state['samples_a_step']} blocks a step, not "
                f"{self.samples_a_step}",
                hint="use as many processes as before, adapting gradient_accumulation_steps, "
                "or --restart",
            )
        self.steering.load_state_dict(state["steering"])
        console.info(f"continuing after step {checkpoint.name.rsplit('-', 1)[1]}")
        self.train(resume_from_checkpoint=str(checkpoint))

    @property
    def samples_a_step(self) -> int:
        """Blocks that one optimiser step sees, all processes together."""
        args = self.args
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return int(batch * self.accelerator.num_processes)


class _EveryStep(TrainerCallback):
    """Checks each step before its update and steers after it."""

    def __init__(self, trainer: RelufyTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        trainer, step = self.trainer, state.global_step + 1
        self.reading = trainer.meter.end_step(
            lambda mean: trainer.accelerator.reduce(mean, reduction="mean")
        )
        self.reading.check(step)
        if not trainer.is_fsdp_enabled:  # there a process has only slices
            check_gradients(list(trainer.model.named_parameters()), step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        self.trainer.steering.update(self.reading.zero_share)


class _Progress(TrainerCallback):
    """A progress bar on a terminal, one line a log entry; all on stderr."""

    bar: tqdm[Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        self.bar = tqdm(
            total=state.max_steps,
            initial=state.global_step,
            desc="relufy",
            unit="step",
            dynamic_ncols=True,
            disable=None if console.verbosity() >= console.NORMAL else True,
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ANN401
        shown = {key: value for key, value in (logs or {}).items() if "/" not in key}
        if self.bar is not None:
            self.bar.clear()
        console.info(f"step {state.global_step}: " + describe(shown))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        if self.bar is not None:
            self.bar.close()


def describe(values: dict[str, float]) -> str:
    """Return `name value` pairs, shortened."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
