"""The training forward pass: hidden states, chunked losses and the sparsity term, in place of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from powerinfer_toolkit.convert.relufy.losses import LossWeights, language_loss
from powerinfer_toolkit.convert.relufy.settings import RelufySettings
from powerinfer_toolkit.convert.relufy.sparsity import SparsityProbe
from powerinfer_toolkit.errors import PiError

MIN_CHUNK_TOKENS = 16


class Teacher:
    """The frozen dense model."""

    def __init__(self, model: Any) -> None:  # noqa: ANN401
        self.model = model.eval().requires_grad_(False)

    @torch.no_grad()
    def hidden(self, input_ids: Tensor) -> Tensor:
        """Return the last hidden states [batch, tokens, d]."""
        decoder = self.model.get_decoder()
        hidden: Tensor = decoder(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden

    @property
    def head(self) -> Tensor:
        """The output matrix [vocabulary, d]."""
        head: Tensor = self.model.get_output_embeddings().weight
        return head


class TrainingForward:
    """Takes the place of a causal language model's `forward` while it is trained.

    Inside the model's own forward, so that DDP and FSDP have the head's weight at hand and see every
    gradient. Returns the loss and its parts: ce and kl in nats a token; penalty and active, see
    sparsity.Reading; all but the loss detached.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401
        settings: RelufySettings,
        probe: SparsityProbe | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.model, self.probe, self.teacher = model, probe, teacher
        temperature = settings.distill_temperature
        self.weights = LossWeights(settings.ce_weight, settings.kl_weight, temperature)
        n_vocab = model.get_output_embeddings().weight.shape[0]
        chunk = settings.loss_chunk_mib * 2**20 // (4 * n_vocab)
        self.compiled = settings.torch_compile
        self.chunk_tokens = max(chunk, MIN_CHUNK_TOKENS)
        if teacher is not None and teacher.head.shape[0] != n_vocab:
            raise PiError(
                f"the teacher's vocabulary has {teacher.head.shape[0]} tokens, the model's {n_vocab}",
                hint="teacher_model_name_or_path has to name a model with the same tokenizer",
            )

    def __call__(
        self,
        input_ids: Tensor,
        teacher_hidden: Tensor | None = None,
        sparsity_weight: float | Tensor = 0.0,
        **_: Any,  # noqa: ANN401 - what adapters pass to any forward
    ) -> dict[str, Tensor]:
        """Return the losses of input_ids [batch, tokens], each token's label being the next one."""
        hidden = self.model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state
        teacher = None
        if self.teacher is not None and teacher_hidden is not None:
            teacher = (_flat(teacher_hidden), self.teacher.head)
        language = language_loss(
            _flat(hidden),
            self.model.get_output_embeddings().weight,
            input_ids[:, 1:].flatten(),
            self.weights,
            self.chunk_tokens,
            teacher,
            compiled=self.compiled,
        )
        parts = {"loss": language.total, "ce": language.ce, "kl": language.kl}
        if self.probe is None:
            return parts
        reading = self.probe.read()
        # A weight of 0 costs no backward pass; a recorded step has its weight in a tensor.
        if isinstance(sparsity_weight, Tensor) or sparsity_weight:
            mean = reading.penalty.sum() / (reading.tokens * len(reading.penalty))
            parts["loss"] = language.total + sparsity_weight * mean
        penalty = reading.penalty.detach() / reading.tokens
        active = reading.active.double() / (reading.tokens * reading.neurons)
        return {**parts, "penalty": penalty, "active": active}


def _flat(hidden: Tensor) -> Tensor:
    """Return [batch * (tokens - 1), d]: the last position has no next token."""
    return hidden[:, :-1].flatten(0, 1)
