"""How the next token is drawn: parameters as in llama.cpp, the drawing itself in native code."""

from __future__ import annotations

import ctypes as ct
import secrets
from dataclasses import dataclass

from powerinfer_toolkit.errors import UsageError
from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.engine import Engine
from powerinfer_toolkit.runtime.native_handle import NativeHandle

_HOTTEST = 1e6  # every distribution is flat long before


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, in the order they apply; `temperature` 0 picks the likeliest token.

    `seed` None draws a new one for every run; the same seed gives the same text on any thread count.
    """

    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # tokens it looks back, -1: all
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    temperature: float = 0.8
    seed: int | None = None

    def __post_init__(self) -> None:
        """UsageError for a value out of range."""
        _check("temperature", self.temperature, 0, _HOTTEST)
        _check("top-k", self.top_k, 0, 2**31 - 1)
        _check("top-p", self.top_p, 0, 1)
        _check("min-p", self.min_p, 0, 1)
        _check("repeat-penalty", self.repeat_penalty, 0.01, 100)
        _check("repeat-last-n", self.repeat_last_n, -1, 2**31 - 1)
        if self.seed is not None:
            _check("seed", self.seed, 0, 2**64 - 1)


def _check(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UsageError(f"{what} {value} is out of range", hint=f"give {low} to {high}")


class Sampler(NativeHandle):
    """Sampling state of one sequence."""

    def __init__(self, sampling: Sampling) -> None:
        """Start from the parameters; `seed` is the one in use afterwards."""
        self.seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._library = native_lib.load()
        super().__init__(self._library.pi_sampler_free, "sampler")
        params = native_lib.SamplerParams(
            top_k=sampling.top_k,
            seed=self.seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repeat_penalty=sampling.repeat_penalty,
            repeat_last_n=sampling.repeat_last_n,
        )
        self._library.pi_sampler_create(ct.byref(params), ct.byref(self.handle))

    def __del__(self) -> None:
        """Free the state of a generation that was left before its end."""
        self.close()

    def accept(self, token: int) -> None:
        """Take note of a token of the text, prompt included, for the repeat penalty."""
        self._library.pi_sampler_accept(self.handle, token)

    def n_top(self) -> int:
        """Return how many of the largest logits the next draw needs (want_top); 0: all of them."""
        n_top = ct.c_uint32()
        self._library.pi_sampler_top(self.handle, ct.byref(n_top))
        return n_top.value

    def sample(self, engine: Engine, row: int = 0) -> tuple[int, float]:
        """Draw from the last step's logits of a wanted token; return (token, its natural-log probability).

        The token is the same whether all logits were wanted or n_top() of the largest; UsageError for fewer.
        """
        token, logprob = ct.c_int32(), ct.c_float()
        self._library.pi_sampler_sample(
            self.handle, engine.handle, row, ct.byref(token), ct.byref(logprob)
        )
        return token.value, logprob.value
