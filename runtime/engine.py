"""A model under a plan: steps of tokens in several sequences, their logits, and the KV cache.

Not for use from several threads at once: at most one step runs, and its results last until the next.
"""

from __future__ import annotations

import ctypes as ct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from powerinfer_toolkit.errors import PiError, UsageError
from powerinfer_toolkit.runtime import native_lib
from powerinfer_toolkit.runtime.model_file import ModelFile
from powerinfer_toolkit.runtime.native_handle import NativeHandle
from powerinfer_toolkit.runtime.native_lib import BytePtr, FloatPtr, Int32Ptr, UInt32Ptr, UInt64Ptr
from powerinfer_toolkit.runtime.plan.machine import threads_on
from powerinfer_toolkit.runtime.plan.plan import Plan

FOR_EVER = 0xFFFFFFFF
WAIT_SLICE_MS = 50  # longest time that a signal waits for the interpreter during a step


class FfnRule(IntEnum):
    """What predicted mode does with one token: PI_RULE_*."""

    AUTO = 0  # as the plan's tier says
    PREDICT = 1  # masked, but for sink positions
    EXACT = 2


@dataclass(frozen=True)
class Batch:
    """The new tokens of one step; arrays are [n_tokens] and a single value stands for all of them."""

    tokens: npt.ArrayLike  # ids in [0, n_vocab); leave empty with embeddings
    sequences: npt.ArrayLike = 0  # ids in [0, n_sequences)
    positions: npt.ArrayLike | None = None  # None: right after what each sequence holds
    want_logits: npt.ArrayLike = False
    want_top: npt.ArrayLike = 0  # of wanted tokens: so many of the largest logits; 0: all of them
    targets: npt.ArrayLike | None = None  # token whose log-probability is wanted, -1 for none
    ffn_rules: npt.ArrayLike = FfnRule.AUTO
    tree_mask: npt.ArrayLike | None = None  # uint64 [n_tokens, ceil(n_tokens / 64)], see pi.h
    embeddings: npt.ArrayLike | None = None  # float32 [n_tokens, n_embd] instead of tokens


@dataclass(frozen=True)
class TopLogits:
    """The largest logits of a row: the largest first, equal ones by token, NaN before all."""

    tokens: npt.NDArray[np.int32]  # [n]
    logits: npt.NDArray[np.float32]  # [n]
    log_sum: float  # log of the row's sum of exp(logit - largest)


@dataclass(frozen=True)
class Stats:
    """What the engine did since its creation or the last reset."""

    n_threads: int
    n_tokens: int
    neurons_total: int  # FFN neurons x tokens
    neurons_active: int  # of those, whose up and down rows mattered
    neurons_guessed: int  # of those, that a predictor let through
    kv_bytes: int
    scratch_bytes: int
    isa: str  # of the CPU's kernels, "" where everything is on the GPU
    device: str  # the GPU's name, "" where none is used
    device_bytes: int  # taken there, the context included
    device_context_bytes: int
    device_launches: int  # kernels and copies queued there since the engine was made
    device_graph_launches: int  # series of them that were queued at once, as graphs
    pinned_bytes: int  # of the host, which the device reads and writes
    handover: int  # HandOver of split layers; AUTO where none is split

    @property
    def active_share(self) -> float:
        """Share of the FFN neurons whose up and down rows mattered; 1 before the first step."""
        return self.neurons_active / self.neurons_total if self.neurons_total else 1.0

    @property
    def guessed_share(self) -> float:
        """Share of the FFN neurons whose gate was computed; 1 without a predictor, and before the first step."""
        return self.neurons_guessed / self.neurons_total if self.neurons_total else 1.0


@dataclass(frozen=True)
class LayerTimes:
    """What the sides of one layer did, in nanoseconds summed over steps; the GPU's by its own clock."""

    n_steps: int
    cpu_ns: int  # the CPU computed: the layer, or its neurons of a split one
    cpu_wait_ns: int  # it waited for what the GPU posts
    gpu_ns: int  # the GPU computed, but for pulled neurons
    pull_ns: int  # it computed pulled neurons
    gpu_wait_ns: int  # it waited for the CPU's share, the way there and back included
    handover_ns: int  # of gpu_wait_ns, that way: neither side computed


class Engine(NativeHandle):
    """The native engine of an open file, which must outlive it."""

    def __init__(self, file: ModelFile, plan: Plan) -> None:
        """Allocate what `plan` says."""
        self.plan = plan
        self.n_vocab = file.shape.n_vocab
        self.n_embd = file.shape.n_embd
        self.n_layers = file.shape.n_layers
        self.n_ff = file.shape.n_ff
        self._library = native_lib.load()
        super().__init__(self._library.pi_engine_free, "model")
        native_plan = plan.to_native()
        with threads_on(plan.cpus):
            self._library.pi_engine_create(
                file.handle, ct.byref(native_plan), ct.byref(self.handle)
            )
        self._ticket = ct.c_uint64()  # of the last step
        self._ended = 0  # ticket of the last step that was waited for

    def submit(self, batch: Batch) -> int:
        """Start a step and return its ticket; the batch is copied. UsageError for a batch that is wrong."""
        native = self._to_native(batch)
        self._library.pi_engine_submit(self.handle, ct.byref(native), ct.byref(self._ticket))
        return self._ticket.value

    def wait(self, ticket: int) -> None:
        """Wait for a step; its failure is raised here. Ctrl-C ends the step and leaves the KV cache."""
        done = ct.c_uint32()
        try:
            while not done.value:
                self._library.pi_engine_wait(self.handle, ticket, WAIT_SLICE_MS, ct.byref(done))
            self._ended = ticket
        except PiError:
            self._ended = ticket
            raise
        except BaseException:
            self._end_step()
            raise

    def run(self, batch: Batch) -> None:
        """Submit and wait."""
        try:
            self.wait(self.submit(batch))
        except PiError:  # refused, or over: another thread's step is not this call's to end
            raise
        except BaseException:
            self._end_step()
            raise

    def _end_step(self) -> None:
        """Abort the step that nobody waits for any more, if there is one."""
        if self._ticket.value == self._ended:
            return
        done = ct.c_uint32()
        with suppress(PiError):
            self._library.pi_engine_abort(self.handle)
            self._library.pi_engine_wait(self.handle, self._ticket.value, FOR_EVER, ct.byref(done))
        self._ended = self._ticket.value

    def logits(self) -> npt.NDArray[np.float32]:
        """Return a copy of the last step's logits, float32 [n_wanted without a want_top, n_vocab]."""
        n_rows, data = ct.c_uint32(), FloatPtr()
        self._library.pi_engine_logits(self.handle, ct.byref(n_rows), ct.byref(data))
        return _copy(data, (n_rows.value, self.n_vocab))

    def top(self, row: int = 0) -> TopLogits:
        """Return a copy of the largest logits of a wanted token; UsageError where all of them were wanted."""
        n, log_sum = ct.c_uint32(), ct.c_float()
        tokens, logits = Int32Ptr(), FloatPtr()
        results = (ct.byref(one) for one in (n, tokens, logits, log_sum))
        self._library.pi_engine_top(self.handle, row, *results)
        ids = np.array(np.ctypeslib.as_array(tokens, shape=(n.value,)))
        return TopLogits(ids, _copy(logits, (n.value,)), log_sum.value)

    def record_fired(self, on: bool) -> None:
        """Turn the record of which neurons fire on or off."""
        self._library.pi_engine_set_recording(self.handle, on)

    def fired(self) -> npt.NDArray[np.bool_]:
        """Return which neurons fired in the last step, bool [n_tokens, n_layers, n_ff], in file order."""
        n_tokens, n_words, data = ct.c_uint32(), ct.c_uint32(), native_lib.UInt64Ptr()
        self._library.pi_engine_fired(
            self.handle, ct.byref(n_tokens), ct.byref(n_words), ct.byref(data)
        )
        words = np.ctypeslib.as_array(data, (n_tokens.value, self.n_layers, n_words.value))
        bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little", count=self.n_ff)
        return bits.astype(np.bool_)

    def logprobs(self) -> npt.NDArray[np.float32]:
        """Return a copy of the last step's natural-log probabilities of the targets, [n_tokens]."""
        n, data = ct.c_uint32(), FloatPtr()
        self._library.pi_engine_logprobs(self.handle, ct.byref(n), ct.byref(data))
        return _copy(data, (n.value,))

    def stats(self) -> Stats:
        """Return the counters."""
        native = native_lib.Stats()
        self._library.pi_engine_stats(self.handle, ct.byref(native))
        texts = {name: (getattr(native, name) or b"").decode() for name in ("isa", "device")}
        names = [name for name in Stats.__dataclass_fields__ if name not in texts]
        fields: dict[str, Any] = {name: getattr(native, name) for name in names}
        return Stats(**fields | texts)

    def time_layers(self, on: bool) -> None:
        """Turn the timing of layers on, from zero, or off."""
        self._library.pi_engine_set_timing(self.handle, on)

    def layer_times(self) -> list[LayerTimes]:
        """Return what the sides of every layer did since its timing began."""
        times = (native_lib.LayerTimes * self.n_layers)()
        self._library.pi_engine_layer_times(self.handle, times)
        names = LayerTimes.__dataclass_fields__
        return [LayerTimes(**{name: getattr(one, name) for name in names}) for one in times]

    def reset_stats(self) -> None:
        """Set the counters to zero."""
        self._library.pi_engine_reset_stats(self.handle)

    def kv_length(self, sequence: int = 0) -> int:
        """Return the number of tokens that a sequence holds."""
        n_tokens = ct.c_uint32()
        self._library.pi_kv_length(self.handle, sequence, ct.byref(n_tokens))
        return n_tokens.value

    def kv_truncate(self, sequence: int, n_tokens: int) -> None:
        """Keep the first n_tokens of a sequence."""
        self._library.pi_kv_truncate(self.handle, sequence, n_tokens)

    def kv_copy(self, source: int, target: int) -> None:
        """Make `target` a copy of `source`; full pages are shared until one is written."""
        self._library.pi_kv_copy(self.handle, source, target)

    def kv_save(self, sequence: int) -> bytes:
        """Return a sequence's state."""
        n_bytes = ct.c_uint64()
        self._library.pi_kv_save(self.handle, sequence, None, ct.byref(n_bytes))
        data = ct.create_string_buffer(n_bytes.value)
        self._library.pi_kv_save(self.handle, sequence, data, ct.byref(n_bytes))
        return data.raw

    def kv_load(self, sequence: int, data: bytes) -> None:
        """Replace a sequence by what kv_save returned; PiError when it is of another model or plan."""
        self._library.pi_kv_load(self.handle, sequence, data, len(data))

    def _to_native(self, batch: Batch) -> native_lib.Batch:
        tokens, embeddings = None, None
        if batch.embeddings is None:
            tokens = int32_array("tokens", batch.tokens, upper=self.n_vocab)
            n_tokens = tokens.size
        else:
            embeddings = np.ascontiguousarray(batch.embeddings, dtype=np.float32)
            if embeddings.ndim != 2 or embeddings.shape[1] != self.n_embd:
                raise UsageError(
                    f"embeddings are [n_tokens, {self.n_embd}]", hint="one row for every token"
                )
            n_tokens = len(embeddings)
        if n_tokens == 0:
            raise UsageError("a batch has at least one token", hint="leave the step out")
        n_sequences = self.plan.n_sequences
        sequences = int32_array("sequences", batch.sequences, n_tokens, upper=n_sequences)
        positions = self._positions(batch.positions, sequences)
        fields: list[tuple[str, Any, npt.NDArray[Any] | None]] = [
            ("tokens", Int32Ptr, tokens),
            ("embeddings", FloatPtr, embeddings),
            ("positions", Int32Ptr, positions),
            ("sequences", Int32Ptr, sequences),
            ("tree_mask", UInt64Ptr, _tree_mask(batch.tree_mask, n_tokens)),
            ("want_logits", BytePtr, _bytes("want_logits", batch.want_logits, n_tokens)),
            ("want_top", UInt32Ptr, _counts("want_top", batch.want_top, n_tokens)),
            ("targets", Int32Ptr, _targets(batch.targets, n_tokens, self.n_vocab)),
            ("ffn_rules", BytePtr, _bytes("ffn_rules", batch.ffn_rules, n_tokens)),
        ]
        pointers = {
            name: native_lib.pointer(array, kind)
            for name, kind, array in fields
            if array is not None
        }
        native = native_lib.Batch(n_tokens=n_tokens, n_position_axes=1, **pointers)
        native.arrays = [array for _, _, array in fields]  # a ctypes struct keeps no array alive
        return native

    def _positions(
        self, asked: npt.ArrayLike | None, sequences: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        if asked is not None:
            return int32_array("positions", asked, sequences.size)
        if sequences.size == 1:  # a decoded token waits for what follows
            return int32_array("positions", self.kv_length(int(sequences[0])), 1)
        positions = np.empty_like(sequences)
        for sequence in np.unique(sequences):
            (rows,) = np.nonzero(sequences == sequence)
            positions[rows] = self.kv_length(int(sequence)) + np.arange(rows.size)
        return positions


def int32_array(
    what: str,
    values: npt.ArrayLike,
    n: int | None = None,
    *,
    lower: int = 0,
    upper: int = 2**31,
) -> npt.NDArray[np.int32]:
    """Return int32 [n] of integers in [lower, upper); a scalar fills it. UsageError for anything else."""
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise UsageError(
            f"{what} must be integers, not {array.dtype}",
            hint="token ids, positions and sequences are integers",
        )
    if array.ndim == 0 and n is not None:
        array = np.full(n, array)
    if array.ndim != 1 or n not in (None, array.size):
        raise UsageError(
            f"{what} has shape {array.shape}, expected [{n or 'n_tokens'}]",
            hint="give one value for every token of the batch",
        )
    if array.size and (array.min() < lower or array.max() >= upper):
        wrong = array[(array < lower) | (array >= upper)][0]
        raise UsageError(
            f"{what}: {wrong} is not in [{lower}, {upper})",
            hint="check it against the plan and the vocabulary",
        )
    return np.ascontiguousarray(array, dtype=np.int32)


def _targets(
    values: npt.ArrayLike | None, n_tokens: int, n_vocab: int
) -> npt.NDArray[np.int32] | None:
    if values is None:
        return None
    return int32_array("targets", values, n_tokens, lower=-1, upper=n_vocab)


def _counts(what: str, values: npt.ArrayLike, n_tokens: int) -> npt.NDArray[np.uint32]:
    return int32_array(what, values, n_tokens).view(np.uint32)


def _bytes(what: str, values: npt.ArrayLike, n_tokens: int) -> npt.NDArray[np.uint8]:
    return np.full(n_tokens, np.asarray(values, dtype=np.uint8))


def _tree_mask(values: npt.ArrayLike | None, n_tokens: int) -> npt.NDArray[np.uint64] | None:
    if values is None:
        return None
    mask = np.ascontiguousarray(values, dtype=np.uint64)
    if mask.shape != (n_tokens, -(-n_tokens // 64)):
        raise UsageError(
            f"tree_mask has shape {mask.shape}, not [n_tokens, ceil(n_tokens / 64)]",
            hint="64 tokens a word, bit j of row i: token i sees token j",
        )
    return mask


def _copy(data: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:  # noqa: ANN401 - ctypes pointer
    if 0 in shape:
        return np.empty(shape, dtype=np.float32)
    return np.array(np.ctypeslib.as_array(data, shape=shape))
