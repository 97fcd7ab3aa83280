"""Predictors of a group of layers, trained online from one pass over the text; nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.train_predictor.capture import (
    GATE_SHARE,
    Captured,
    CostModel,
    Costs,
    capture,
)
from powerinfer_toolkit.train_predictor.masking import to_tokens
from powerinfer_toolkit.train_predictor.network import PredictorStack, Whitening
from powerinfer_toolkit.train_predictor.settings import SVD, PredictorSettings
from powerinfer_toolkit.train_predictor.texts import Blocks
from powerinfer_toolkit.training.checkpoint import SparseModel
from powerinfer_toolkit.training.precision import float32_products

_MAX_BIAS = 6.0
_CHECKS = 50  # of the loss, spread over a training


@dataclass
class Context:
    """What every step of the work on some layers needs."""

    model: SparseModel
    accelerator: Accelerator
    settings: PredictorSettings
    frequency: NDArray[np.float64]  # [n_layers, n_ff] of all layers, from the statistics
    costs: CostModel = field(init=False)
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        """Make the cost model, and seed."""
        self.costs = CostModel(self.settings, self.model)
        self.generator = torch.Generator(self.model.device)
        self.reseed(0)

    def reseed(self, layer: int) -> None:
        """Seed what is random: initial weights alike, sampled labels differently in every process.

        Done for every group of layers, so that a resumed run draws what an uninterrupted one draws.
        """
        seed = self.settings.seed + 10_000 * layer
        torch.manual_seed(seed)
        self.generator.manual_seed(seed + 1 + self.accelerator.process_index)

    def batches(self, blocks: Blocks, label: str) -> Iterator[Tensor]:
        """Yield this process's batches [n_sequences, n_positions]; all processes get as many."""
        n_processes, size = self.n_processes, self.batch_size(blocks)
        rounds = self.n_batches(blocks)
        for number in console.progress(range(rounds), total=rounds, label=label, unit="batch"):
            begin = (number * n_processes + self.accelerator.process_index) * size
            yield to_tokens(blocks[begin : begin + size], self.model.device)

    @property
    def n_processes(self) -> int:
        """Processes that share the work."""
        return int(self.accelerator.num_processes)

    def batch_size(self, blocks: Blocks) -> int:
        """Return the blocks of a batch; PiError where there is not one for each process."""
        n_processes = self.n_processes
        if len(blocks) < n_processes:
            raise PiError(
                f"{len(blocks)} blocks of {self.settings.max_length} tokens are too few for {n_processes} processes",
                hint="give more text, or a smaller max_length",
            )
        return min(self.settings.per_device_batch_size, len(blocks) // n_processes)

    def n_batches(self, blocks: Blocks) -> int:
        """Return how many batches `batches` yields."""
        return len(blocks) // (self.batch_size(blocks) * self.n_processes)

    def n_parts(self, n_tokens: int) -> int:
        """Return into how many steps of the predictors n_tokens go."""
        return max(1, round(n_tokens / self.settings.predictor_batch_tokens))

    def capture(self, tokens: Tensor, layers: Sequence[int]) -> Captured:
        """Capture with the gradient where the cost needs it."""
        generator = self.generator if self.costs.needs_gradient else None
        return capture(self.model, tokens, layers, generator=generator)


def whitening_of(context: Context, blocks: Blocks, layers: Sequence[int]) -> Whitening:
    """Return the whitening of the layers' inputs, from their second moments over `blocks`."""
    n_layers, n_embd = len(layers), context.model.n_embd
    device = context.model.device
    second = torch.zeros(n_layers, n_embd, n_embd, dtype=torch.float64, device=device)
    first = torch.zeros(n_layers, n_embd, dtype=torch.float64, device=device)
    n_tokens = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():
        for tokens in context.batches(blocks, "moments"):
            inputs = capture(context.model, tokens, layers).inputs
            second += (inputs.mT @ inputs).double()
            first += inputs.sum(1).double()
            n_tokens += inputs.shape[1]
    second, first, n_tokens = (
        context.accelerator.reduce(value, "sum") for value in (second, first, n_tokens)
    )
    return Whitening.of(second / n_tokens, first / n_tokens)


@dataclass
class Trained:
    """The predictors of a group of layers by rank, and the mean loss a token at some steps, in prices."""

    stacks: list[PredictorStack]
    losses: list[tuple[int, float]]


def train_group(
    context: Context, blocks: Blocks, layers: Sequence[int], whitening: Whitening
) -> Trained:
    """Train one stack of every rank in the settings on the activations of `layers`. Raises PiError for NaN."""
    stacks = _new_stacks(context, layers, whitening)
    steps = _Steps(context, stacks, _n_steps(context, blocks))
    with float32_products("tf32"):
        for epoch in range(context.settings.num_train_epochs):
            order = np.random.default_rng([context.settings.seed, epoch]).permutation(len(blocks))
            for tokens in context.batches(blocks[order], f"train {_span(layers)}"):
                captured = context.capture(tokens, layers)
                n_parts = context.n_parts(captured.inputs.shape[1])
                for number in range(n_parts):
                    part = captured.part(number, n_parts)
                    steps.take(part, layers)
    return Trained(stacks, steps.finish(layers))


def _n_steps(context: Context, blocks: Blocks) -> int:
    parts = context.n_parts(context.batch_size(blocks) * (blocks.shape[1] - 1))
    return context.settings.num_train_epochs * context.n_batches(blocks) * parts


def _new_stacks(
    context: Context, layers: Sequence[int], whitening: Whitening
) -> list[PredictorStack]:
    stacks = []
    for rank in context.settings.predictor_rank:
        stack = PredictorStack(whitening, rank, context.model.n_ff).to(context.model.device)
        if context.settings.predictor_init == SVD:
            stack.set_singular_vectors(_gates(context.model, layers), whitening)
        stacks.append(stack)
    return stacks


def _gates(model: SparseModel, layers: Sequence[int]) -> Tensor:
    """Return the gates' weights [n_layers, n_ff, n_embd] for inputs before the norm's gain."""
    blocks = [model.blocks[layer] for layer in layers]
    return torch.stack([b.gate.weight.float() * b.norm.weight.float() for b in blocks])


class _Steps:
    """Adam on every stack, with one schedule, and a record of the loss."""

    def __init__(self, context: Context, stacks: list[PredictorStack], n_steps: int) -> None:
        self._context = context
        self._stacks = stacks
        parameters = [p for stack in stacks for p in stack.parameters()]
        fused = context.model.device.type == "cuda"
        self._optimizer = torch.optim.Adam(
            parameters, lr=context.settings.learning_rate, fused=fused
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR
        self._schedule = schedule(self._optimizer, max(n_steps, 1))
        # Some forty passes over [n_layers, n_tokens, n_ff] in float32 become four.
        self._loss = torch.compile(self._loss_of) if fused else self._loss_of
        self._interval = max(1, n_steps // _CHECKS)
        self._n_steps = 0
        self._running = torch.zeros(())
        self._losses: list[tuple[int, float]] = []

    def take(self, part: Captured, layers: Sequence[int]) -> None:
        """Take one step on every stack."""
        if self._n_steps == 0:
            self._start(self._context.costs.of(part, layers), layers)
        for stack in self._stacks:
            loss = self._loss(stack(part.inputs), part, layers)
            loss.sum().backward()
            self._running = self._running + loss.detach()
        self._average_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        self._n_steps += 1
        if self._n_steps % self._interval == 0:
            self._check(layers)

    def _loss_of(self, logits: Tensor, part: Captured, layers: Sequence[int]) -> Tensor:
        return cost_loss(logits, self._context.costs.of(part, layers))

    def finish(self, layers: Sequence[int]) -> list[tuple[int, float]]:
        """Return (step, loss) pairs."""
        if self._n_steps % self._interval:
            self._check(layers)
        return self._losses

    def _start(self, costs: Costs, layers: Sequence[int]) -> None:
        """Begin where every neuron is let through as often as its mean costs say."""
        self._running = torch.zeros(len(layers), device=costs.miss.device)
        if self._context.settings.predictor_init == SVD:
            return
        sums = torch.stack([costs.miss.sum((1, 2)), (costs.miss > 0).sum((1, 2))])
        total, n_misses = self._context.accelerator.reduce(sums, "sum")
        mean = (total / n_misses.clamp(min=1))[:, None]
        frequency = torch.from_numpy(self._context.frequency[list(layers)]).to(mean)
        read = GATE_SHARE + (1 - GATE_SHARE) * frequency
        bias = (frequency * mean / read).clamp(min=1e-30).log().clamp(-_MAX_BIAS, _MAX_BIAS)
        for stack in self._stacks:
            stack.set_bias(bias)

    def _average_gradients(self) -> None:
        if self._context.n_processes == 1:
            return
        for stack in self._stacks:
            for parameter in stack.parameters():
                parameter.grad = self._context.accelerator.reduce(parameter.grad, "mean")

    def _check(self, layers: Sequence[int]) -> None:
        """Record the mean loss since the last check; PiError where it is no number."""
        n_steps = self._n_steps - (self._losses[-1][0] if self._losses else 0)
        running = self._context.accelerator.reduce(self._running, "mean")
        by_layer = (running / n_steps / len(self._stacks)).tolist()
        self._running = torch.zeros_like(running)
        for layer, loss in zip(layers, by_layer, strict=True):
            if not np.isfinite(loss):
                raise PiError(
                    f"the loss of layer {layer} is {loss} at step {self._n_steps}",
                    hint="try a lower learning_rate, or torch_dtype bfloat16 or float32",
                )
        self._losses.append((self._n_steps, float(np.mean(by_layer))))


def cost_loss(logits: Tensor, costs: Costs) -> Tensor:
    """Return the loss by layer [n_layers] of logits [n_layers, n_tokens, n_ff], a mean over tokens.

    It is miss * log(1 + exp(-s)) + read * log(1 + exp(s)), least where s = log(E[miss] / E[read]): the neuron is
    let through where missing it costs more than reading it.
    """
    weight = costs.read + costs.miss
    losses = binary_cross_entropy_with_logits(logits, costs.miss / weight, weight, reduction="none")
    return losses.sum((1, 2)) / logits.shape[1]


def _span(layers: Sequence[int]) -> str:
    return f"layers {layers[0]}-{layers[-1]}"
