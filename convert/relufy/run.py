"""One run from settings to a checkpoint: load, train or continue, calibrate, save with what it was made from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from torch import nn

from powerinfer_toolkit import console, hub
from powerinfer_toolkit.convert.relufy import checkpoints, mixture, variants
from powerinfer_toolkit.convert.relufy.evaluate import Evaluation, calibrate_threshold, evaluate
from powerinfer_toolkit.convert.relufy.graphed import whole_block_attention
from powerinfer_toolkit.convert.relufy.objective import Teacher, TrainingForward
from powerinfer_toolkit.convert.relufy.output import Output
from powerinfer_toolkit.convert.relufy.settings import RelufySettings, Variant
from powerinfer_toolkit.convert.relufy.sparsity import SparsityProbe
from powerinfer_toolkit.convert.relufy.steering import steering_for
from powerinfer_toolkit.convert.relufy.trainer import RelufyTrainer, training_arguments
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.training import blocks
from powerinfer_toolkit.training.blocks import Blocks, Split, TextEncoder, TokenStore


@dataclass
class Data:
    """What a run reads."""

    train: mixture.MappedMixture | mixture.StreamedMixture
    test: Blocks
    calibration: Blocks | None


def relufy(settings: RelufySettings, *, restart: bool = False) -> Path:
    """Make the sparse checkpoint that the settings describe and return its directory.

    A run that was interrupted goes on from its last checkpoint; a finished one is left as it is. Raises
    PiError.
    """
    state = PartialState(cpu=not torch.cuda.is_available())
    output = Output(settings)
    if state.is_main_process:
        output.open(restart=restart)
    state.wait_for_everyone()
    if output.is_finished:
        console.info(f"{output.folder} is finished already")
        return output.folder
    set_seed(settings.seed)
    source = hub.locate(settings.model_name_or_path)
    config = variants.student_config(settings, source.path)
    tokenizer = _tokenizer(source.path)
    encoder = blocks.text_encoder(tokenizer, settings.separator_token)
    data = _data(settings, encoder, state)
    bf16 = _bf16(settings)
    teacher = _teacher(settings, source.path, bf16=bf16)
    trainer = _trainer(settings, source.path, config, data, teacher, bf16=bf16)
    _train(trainer, settings, output)
    threshold, results = _measure(trainer, settings, data, teacher)
    dtype = variants.saved_dtype(settings, config)
    model, weights = _final_weights(trainer, settings)
    if state.is_main_process:
        with output.writing() as folder:
            variants.save_checkpoint(model, weights, folder, dtype=dtype, threshold=threshold)
            tokenizer.save_pretrained(folder)
        output.finish(source, results)
    state.wait_for_everyone()
    return output.folder


def _tokenizer(path: Path) -> Any:  # noqa: ANN401
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as failure:
        raise PiError(
            f"{path} has no tokenizer that can be read: {failure}",
            hint="put tokenizer.json and tokenizer_config.json beside the weights",
        ) from failure


def _data(settings: RelufySettings, encoder: TextEncoder, state: PartialState) -> Data:
    """Return training and held-out data; the main process tokenises, the others read what it wrote."""
    wants_calibration = (
        settings.variant == Variant.FATRELU and settings.activation_threshold is None
    )
    if settings.streaming:
        test = mixture.streamed_held_out(settings, encoder, Split.TEST)
        calibration = None
        if wants_calibration:
            calibration = mixture.streamed_held_out(settings, encoder, Split.CALIBRATION)
        return Data(mixture.StreamedMixture(settings, encoder), test, calibration)
    store = TokenStore(settings, encoder, token_folder(settings))
    with state.main_process_first():
        store.make()
    samples_a_step = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    train = mixture.MappedMixture(settings, store, samples_a_step * state.num_processes)
    test = blocks.held_out_blocks(store, Split.TEST, settings.eval_blocks)
    calibration = None
    if wants_calibration:
        calibration = blocks.held_out_blocks(store, Split.CALIBRATION, settings.eval_blocks)
    return Data(train, test, calibration)


def token_folder(settings: RelufySettings) -> Path:
    """Return where a run keeps its tokens."""
    return Path(settings.token_dir or Path(settings.output_dir) / "tokens")


def _bf16(settings: RelufySettings) -> bool:
    """Return whether to compute in bfloat16. Raises PiError where the device cannot."""
    able = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    if settings.bf16 and torch.cuda.is_available() and not able:
        raise PiError("this GPU has no bfloat16", hint="set bf16 to false")
    return able if settings.bf16 is None else settings.bf16


def _teacher(settings: RelufySettings, dense: Path, *, bf16: bool) -> Teacher | None:
    """Return the frozen teacher on this process's device, None where no loss needs it."""
    if settings.kl_weight == 0:
        return None
    named = settings.teacher_model_name_or_path
    path = hub.locate(named).path if named else dense
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = variants.read_config(path)
    model = variants.load_model(path, config, dtype, _attention(settings, config))
    return Teacher(model.to(PartialState().device))


def _attention(settings: RelufySettings, config: Any) -> str:  # noqa: ANN401
    """Return the name of the attention. Raises PiError where cuda_graph cannot be."""
    if not settings.cuda_graph:
        return settings.attn_implementation
    state = PartialState()
    if state.device.type != "cuda" or state.num_processes > 1:
        raise PiError(
            f"cuda_graph needs one process on a GPU, not {state.num_processes} on {state.device.type}",
            hint="set cuda_graph to false",
        )
    return whole_block_attention(config, settings.max_length)


def _trainer(
    settings: RelufySettings,
    source: Path,
    config: Any,  # noqa: ANN401
    data: Data,
    teacher: Teacher | None,
    *,
    bf16: bool,
) -> RelufyTrainer:
    dtype = torch.bfloat16 if settings.use_peft and bf16 else torch.float32
    causal_lm = variants.load_model(source, config, dtype, _attention(settings, config))
    if settings.activation_threshold is not None:
        variants.set_threshold(causal_lm, settings.activation_threshold)
    model = variants.add_adapters(causal_lm, settings) if settings.use_peft else causal_lm
    if settings.gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    probe = SparsityProbe(causal_lm, settings.sparsity_concavity)
    causal_lm.forward = TrainingForward(causal_lm, settings, probe, teacher)
    if settings.torch_compile:
        _compile_layers(causal_lm)
        if teacher is not None:
            _compile_layers(teacher.model)
    n_steps = data.train.n_steps
    try:
        arguments = training_arguments(settings, n_steps, bf16=bf16)
    except (ValueError, TypeError) as failure:
        raise UsageError(
            f"transformers refuses these settings: {failure}",
            hint="they go to transformers.TrainingArguments as they are",
        ) from failure
    steering = steering_for(settings, n_steps)
    trainer = RelufyTrainer(
        model,
        arguments,
        data.train,
        data.test,
        steering,
        teacher,
        cuda_graph=settings.cuda_graph,
    )
    if trainer.is_fsdp_enabled and settings.use_peft:
        raise PiError(
            "adapters cannot be merged under FSDP", hint="use DDP, or set use_peft: false"
        )
    return trainer


def _compile_layers(causal_lm: Any) -> None:  # noqa: ANN401
    """Compile layer by layer: one graph serves all."""
    for layer in causal_lm.get_decoder().layers:
        layer.compile()


def _train(trainer: RelufyTrainer, settings: RelufySettings, output: Output) -> None:
    if settings.max_steps == 0:
        return
    whole = checkpoints.whole_checkpoints(output.checkpoints)
    if whole:
        trainer.resume(whole[-1])
    else:
        trainer.train()


def _measure(
    trainer: RelufyTrainer, settings: RelufySettings, data: Data, teacher: Teacher | None
) -> tuple[float, dict[str, Any]]:
    """Return the activation threshold and the figures of the finished model on the test blocks."""
    results = {"relu": _figures(trainer.measure(data.test))}
    threshold = settings.activation_threshold or 0.0
    if data.calibration is not None:
        calibration = data.calibration
        threshold = calibrate_threshold(
            _causal_lm(trainer), lambda: trainer.measure(calibration), settings.perplexity_allowance
        )
        results["fatrelu"] = {"threshold": threshold, **_figures(trainer.measure(data.test))}
    if teacher is not None:
        forward = TrainingForward(teacher.model, settings)
        batch_size = settings.per_device_train_batch_size
        found = evaluate(forward, data.test, batch_size, trainer.args.device)
        results["teacher"] = _figures(found)
    return threshold, results


def _figures(found: Evaluation) -> dict[str, Any]:
    return {
        "perplexity": found.perplexity,
        "loss": found.loss,
        "tokens": found.tokens,
        "zero_share": found.zero_share,
        "zero_share_by_layer": found.zero_share_by_layer,
    }


def _causal_lm(trainer: RelufyTrainer) -> nn.Module:
    """Return the causal language model behind adapters and wrappers."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    found: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return found


def _final_weights(
    trainer: RelufyTrainer, settings: RelufySettings
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return the model without adapters and its whole state, on the processes that ask together."""
    if settings.use_peft:
        model = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
        return model, model.state_dict()
    return _causal_lm(trainer), trainer.accelerator.get_state_dict(trainer.model_wrapped)
