"""PowerInferLM: a model file as a model of lm_eval, in process.

The rules of lm_eval's own `hf` model hold: how a context is joined to its continuation, what an empty context
stands for, that texts too long lose their beginning, where a generation stops. So results of a file and of its
checkpoint can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from powerinfer_toolkit import console
from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.gguf_format import Key
from powerinfer_toolkit.recipes.evaluate.generation import StopTexts, generation_settings
from powerinfer_toolkit.recipes.evaluate.scoring import Scorer, Text
from powerinfer_toolkit.runtime.chat_template import ChatTemplate
from powerinfer_toolkit.runtime.model import Model

DEFAULT_SEQUENCES = 8
Pair = tuple[list[int], list[int]]  # context, continuation


class PowerInferLM(TemplateLM):
    """A model file behind lm_eval's interface.

    `path`, `ffn` (dense, exact, predicted) and the others are pi-run's; `max_length` is the context, all that the
    model was trained for by default; `batch_size` texts are scored at a time; `add_bos_token` and
    `prefix_token_id` mean what they mean for `hf`. `device` is not looked at: lm_eval names a GPU where nothing is
    said. Raises PiError as Model.load does.
    """

    def __init__(
        self,
        path: str,
        ffn: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        max_length: int | None = None,
        threads: int | None = None,
        kv_type: str | None = None,
        activation_type: str | None = None,
        predict_all: bool = False,
        sparse_threshold: float | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_gen_toks: int = 256,
    ) -> None:
        super().__init__()
        n_sequences = _sequences(batch_size, max_batch_size)
        self._model = Model.load(
            path,
            context=max_length or 0,
            sequences=n_sequences,
            ffn=ffn,
            threads=threads,
            kv_type=kv_type,
            activation_type=activation_type,
            predict_all=predict_all,
            sparse_threshold=sparse_threshold,
        )
        self._name = Path(path).name
        self._text_tokenizer = self._model.tokenizer
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self.max_gen_toks = max_gen_toks
        self.batch_size = n_sequences

    @property
    def max_length(self) -> int:
        """Tokens that the context holds."""
        return self._model.plan.n_context

    @property
    def eot_token_id(self) -> int:
        """The end of a text."""
        if self._text_tokenizer.eos_id is None:
            raise PiError(
                f"{self._name} has no end-of-text token", hint="give prefix_token_id in model_args"
            )
        return self._text_tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context is predicted from."""
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        bos_id = self._text_tokenizer.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **_: object,
    ) -> list[int]:
        """Return token ids, with BOS as the model has it, or as told; not twice where the text begins with it."""
        add = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self._prefix_text()):
            add = False
        ids = self._text_tokenizer.encode(string, add_special=add is not False)
        return ids[-left_truncate_len:] if left_truncate_len else ids

    def tok_decode(self, tokens: Iterable[int] | int, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        ids = [tokens] if isinstance(tokens, int) else tokens
        return self._text_tokenizer.decode(ids, skip_special=skip_special_tokens)

    def _prefix_text(self) -> str:
        return self.tok_decode(self.prefix_token_id, skip_special_tokens=False)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: object,
    ) -> list[tuple[float, bool]]:
        texts = [self._text(context, continuation) for _, context, continuation in requests]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(texts)
        scores = Scorer(self._model).score(texts, greedy=True)
        label = "loglikelihood"
        for i, score in console.progress(scores, total=len(texts), label=label, unit="text"):
            answers[i] = (score.logprob, score.is_greedy)
            if (key := requests[i][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", key, answers[i])
        return answers

    def _text(self, context: list[int], continuation: list[int]) -> Text:
        """Return both together without what does not fit; UsageError where the continuation alone does not."""
        if len(continuation) > self.max_length:
            raise UsageError(
                f"a continuation of {len(continuation)} tokens does not fit the context of {self.max_length}",
                hint="raise max_length",
            )
        tokens = (context + continuation)[-(self.max_length + 1) :]
        return Text(tuple(tokens), len(continuation))

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of whole texts, in windows as lm_eval cuts them."""
        texts, owners = [], []
        for i, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                texts.append(self._text(context, continuation))
                owners.append(i)
        sums = [0.0] * len(requests)
        scores = Scorer(self._model).score(texts, greedy=False)
        label = "loglikelihood_rolling"
        for i, score in console.progress(scores, total=len(texts), label=label, unit="window"):
            sums[owners[i]] += score.logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what follows each context, up to the first stop text, greedily unless told otherwise."""
        order = sorted(range(len(requests)), key=lambda i: str(requests[i].args[0]))
        answers = [""] * len(requests)
        label = "generate_until"
        for i in console.progress(order, total=len(order), label=label, unit="text"):
            context, options = requests[i].args
            answers[i] = self._generate(context, options)
            self.cache_hook.add_partial("generate_until", (context, options), answers[i])
        return answers

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        settings = generation_settings(options, self.max_gen_toks)
        room = self.max_length - settings.n_predict
        if room < 1:
            raise UsageError(
                f"{settings.n_predict} new tokens leave no room in a context of {self.max_length}",
                hint="lower max_gen_toks, or raise max_length",
            )
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stop = StopTexts([*settings.until, end], self._text_tokenizer)
        generation = self._model.generate(
            self.tok_encode(context, left_truncate_len=room) or [self.prefix_token_id],
            n_predict=settings.n_predict,
            sampling=settings.sampling,
            ignore_eos=True,
            stop=stop.texts,
            reuse_cache=True,
        )
        ids = []
        for token in generation:
            ids.append(token.id)
            if token.id in stop.token_ids:
                break
        return stop.cut(self.tok_decode(ids))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a chat by the file's template. PiError where it has none."""
        template = self._text_tokenizer.chat_template
        if template is None:
            raise PiError(f"{self._name} has no chat template", hint="leave --apply_chat_template")
        return ChatTemplate(template).render(
            chat_history,
            special_tokens=self._text_tokenizer.special_tokens,
            add_generation_prompt=add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the file's template, whichever name is asked for."""
        return self._text_tokenizer.chat_template if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """What caches of requests know the tokenizer by."""
        return self._name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return what a record of results should say of the model."""
        plan = self._model.plan
        return {
            "model_file": self._name,
            "model_source": self._model.metadata(Key.SOURCE_NAME),
            "model_revision": self._model.metadata(Key.SOURCE_REVISION),
            "model_sha": self._model.metadata(Key.SOURCE_SHA256),
            "ffn_mode": plan.ffn_mode.name.lower(),
            "kv_type": plan.kv_type.name.lower(),
            "activation_type": plan.activation_type.name.lower(),
        }


def _sequences(batch_size: int | str, max_batch_size: int | None) -> int:
    """Return how many texts are scored at a time; "auto" is a number that pays for choices of one question."""
    if str(batch_size).startswith("auto"):
        return min(DEFAULT_SEQUENCES, max_batch_size or DEFAULT_SEQUENCES)
    if not str(batch_size).isdecimal() or int(batch_size) < 1:
        raise UsageError(f"batch_size {batch_size} is out of range", hint="give 1 or more, or auto")
    return int(batch_size)
