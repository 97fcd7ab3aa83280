"""The model as users see it: load, logits, scores, generation."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.runtime.engine import Batch, Engine, FfnRule, Stats, int32_array
from powerinfer_toolkit.runtime.generate import Generation, Limits
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.plan.gpu import plan_run
from powerinfer_toolkit.runtime.plan.plan import FfnMode, Plan
from powerinfer_toolkit.runtime.plan.planner import DEFAULT_BATCH, PlanOptions
from powerinfer_toolkit.runtime.plan.shape import ModelShape
from powerinfer_toolkit.runtime.plan.surroundings import look
from powerinfer_toolkit.runtime.sampling import Sampling

if TYPE_CHECKING:
    from powerinfer_toolkit.runtime.record import ActivationRecorder
    from powerinfer_toolkit.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int]


class Model:
    """An open model with an engine; a context manager that survives being closed twice.

    `engine` is the level below: steps with several sequences, and the KV cache. The methods here use
    sequence 0, so they and a generation in progress exclude each other.
    """

    def __init__(self, file: ModelFile, plan: Plan) -> None:
        """Take over the open file and allocate what the plan says."""
        self.file = file
        self.plan = plan
        self._cached: list[int] = []  # tokens that sequence 0 holds
        self._text_id = 0  # counts the users of sequence 0
        self._recorder: ActivationRecorder | None = None
        try:
            self.engine = Engine(file, plan)
        except BaseException:
            file.close()
            raise

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        context: int | None = None,
        batch: int = DEFAULT_BATCH,
        sequences: int = 1,
        ffn: str | None = None,
        predict_all: bool = False,
        kv_type: str | None = None,
        activation_type: str | None = None,
        sparse_threshold: float | None = None,
        isa: str | None = None,
        ram_budget_bytes: int | None = None,
        vram_budget_bytes: int | None = None,
        cpus: tuple[int, ...] | None = None,
        split: bool = True,
        handover: str | None = None,
    ) -> Self:
        """Open a GGUF or PowerInfer-GGUF file, plan and allocate; PlanOptions explains the options.

        Raises UsageError for what the file or machine cannot honour, DoesNotFit where memory is short,
        PiError for a file that is no model.
        """
        options = PlanOptions(
            threads=threads,
            context=context,
            batch=batch,
            sequences=sequences,
            ffn=ffn,
            predict_all=predict_all,
            kv_type=kv_type,
            activation_type=activation_type,
            sparse_threshold=sparse_threshold,
            isa=isa,
            ram_budget_bytes=ram_budget_bytes,
            vram_budget_bytes=vram_budget_bytes,
            cpus=cpus,
            split=split,
            handover=handover,
        )
        return cls.open(path, options)

    @classmethod
    def open(cls, path: str | os.PathLike[str], options: PlanOptions) -> Self:
        """Do what load does, with the options as one object."""
        file = ModelFile(path)
        try:
            plan = plan_run(file.shape, options, look(options))
        except BaseException:
            file.close()
            raise
        return cls(file, plan)

    def __enter__(self) -> Self:
        """Return the model."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __del__(self) -> None:
        """Close a model that was never closed."""
        if "engine" in self.__dict__:
            self.close()

    def close(self) -> None:
        """Free the engine, then the file; more calls do nothing."""
        self.engine.close()
        self.file.close()

    @property
    def config(self) -> ModelShape:
        """Shapes and constants of the model."""
        return self.file.shape

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer, built on first use; PiError when the file has none."""
        from powerinfer_toolkit.runtime.tokenizer import Tokenizer

        return Tokenizer.from_metadata(self.file.metadata, self.config.n_vocab)

    def metadata(self, name: str) -> Any:  # noqa: ANN401 - the type is the file's
        """Return the value of a metadata key, None when the file has no such key."""
        return self.file.metadata(name)

    def stats(self) -> Stats:
        """Return the engine's counters."""
        return self.engine.stats()

    def logits(self, tokens: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return float32 [n_tokens, n_vocab] for a fresh sequence of token ids.

        In predicted mode a sequence longer than the prediction tier is computed exactly, as a prompt is,
        unless the model was loaded with predict_all.
        """
        ids = self._checked(tokens)
        out = np.empty((ids.size, self.config.n_vocab), dtype=np.float32)
        rule = self._prompt_rule(ids.size)
        for begin, chunk in self._chunks(ids):
            self._step(Batch(chunk, want_logits=True, ffn_rules=rule))
            out[begin : begin + chunk.size] = self.engine.logits()
        return out

    def score(self, tokens: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Return float32 [n_tokens - 1]: natural-log probabilities of tokens[1:], each after those before.

        Every token is computed as decoding would compute it: in predicted mode all but the sink positions
        are masked.
        """
        ids = self._checked(tokens)
        targets = np.append(ids[1:], np.int32(-1))
        out = np.empty(ids.size, dtype=np.float32)
        predicted = self.plan.ffn_mode is FfnMode.PREDICTED
        rule = FfnRule.PREDICT if predicted else FfnRule.AUTO
        for begin, chunk in self._chunks(ids):
            end = begin + chunk.size
            self._step(Batch(chunk, targets=targets[begin:end], ffn_rules=rule))
            out[begin:end] = self.engine.logprobs()
        return out[:-1]

    def generate(
        self,
        prompt: Prompt,
        *,
        n_predict: int = -1,
        sampling: Sampling | None = None,
        ignore_eos: bool = False,
        stop: Iterable[str] = (),
        reuse_cache: bool = False,
    ) -> Generation:
        """Return an iterator over the tokens that follow a prompt (text, or token ids as they are).

        `n_predict` negative means until an end-of-generation token or a full context; `ignore_eos` goes on
        after such tokens. `stop` texts end the output. `reuse_cache` keeps what the last call computed for
        a common beginning, as in a chat. Raises UsageError for an empty prompt, PiError for one that does
        not fit the context.
        """
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if not reuse_cache:
            self.forget()
        limits = Limits(n_predict, ignore_eos, tuple(stop))
        return Generation(self, self._checked(ids).tolist(), sampling or Sampling(), limits)

    def forget(self) -> None:
        """Empty sequence 0, which the next text then shares nothing with."""
        self._take_sequence(0)

    def start_text(self, tokens: Sequence[int], want_top: int = 0) -> int:
        """Make sequence 0 hold `tokens` with the logits of the last one at hand; return its user's id.

        `want_top`: so many of the largest ones, 0: all.
        """
        pairs = zip(self._cached, tokens[:-1], strict=False)
        n_kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._take_sequence(n_kept)
        user = self._text_id
        rule = self._prompt_rule(len(tokens))
        ids = np.asarray(tokens[n_kept:], dtype=np.int32)
        for begin in range(0, ids.size, self.plan.max_batch_tokens):
            chunk = ids[begin : begin + self.plan.max_batch_tokens]
            last = np.arange(begin, begin + chunk.size) == ids.size - 1
            self._step(Batch(chunk, want_logits=last, want_top=want_top, ffn_rules=rule))
            self._cached += chunk.tolist()
        return user

    def continue_text(self, user: int, token: int, want_top: int = 0) -> bool:
        """Append a token to sequence 0 and compute its logits; False when the context is full.

        `want_top`: the largest ones, as in start_text.
        """
        if user != self._text_id:
            raise PiError(
                "another call has taken the model's sequence from this generation",
                hint="finish one generation before the next, or use model.engine with sequences",
            )
        if len(self._cached) >= self.plan.n_context:
            return False
        self._step(Batch([token], want_logits=True, want_top=want_top))
        self._cached.append(token)
        return True

    def record_activations(self) -> ActivationRecorder:
        """Count from now on which neurons fire in sequence 0; UsageError where the model's plan does not tell."""
        from powerinfer_toolkit.runtime.record import ActivationRecorder, check_recordable

        check_recordable(self)
        self.engine.record_fired(True)
        bos_id = self.tokenizer.bos_id if self.tokenizer.adds_bos else None
        self._recorder = ActivationRecorder(self.config.n_layers, self.config.n_ff, bos_id)
        return self._recorder

    def _step(self, batch: Batch) -> None:
        """Run a step of sequence 0."""
        position = self.engine.kv_length()
        self.engine.run(batch)
        if self._recorder is not None:
            tokens = np.asarray(batch.tokens).tolist()
            self._recorder.observe(position, tokens, self.engine.fired())

    def _checked(self, tokens: npt.ArrayLike) -> npt.NDArray[np.int32]:
        ids = int32_array("tokens", tokens, upper=self.config.n_vocab)
        if not ids.size:
            raise UsageError("no tokens: the prompt is empty", hint="give at least one token")
        if ids.size > self.plan.n_context:
            raise PiError(
                f"a prompt of {ids.size} tokens does not fit the context of {self.plan.n_context}",
                hint="raise the context (-c), or shorten the prompt",
            )
        return ids

    def _prompt_rule(self, n_tokens: int) -> FfnRule:
        """Large prompts run exactly as a whole, so that a short last chunk is not masked alone."""
        masked = self.plan.predict_all or n_tokens <= self.plan.predicted_tokens
        return FfnRule.AUTO if masked or not self.plan.predicted_tokens else FfnRule.EXACT

    def _chunks(self, ids: npt.NDArray[np.int32]) -> Iterable[tuple[int, npt.NDArray[np.int32]]]:
        """Yield (begin, tokens) of every step of a fresh sequence."""
        self.forget()
        for begin in range(0, ids.size, self.plan.max_batch_tokens):
            yield begin, ids[begin : begin + self.plan.max_batch_tokens]

    def _take_sequence(self, n_kept: int) -> None:
        self._text_id += 1
        self._cached = self._cached[:n_kept]
        self.engine.kv_truncate(0, n_kept)
