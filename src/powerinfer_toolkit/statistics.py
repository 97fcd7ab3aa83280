"""Activation statistics: which FFN neurons fire, counted exactly, from any source of tokens.

A neuron fires at a token when its activation act(gate) * up is not 0. Only counted tokens enter: position 0 of a
sequence (the attention sink), BOS (where the tokenizer begins texts with it) and padding do not. A window of w
tokens is positions 1 + k w .. w + k w of a sequence, and enters when all of them are counted. Every quantity is an
integer sum, so that tallies of parts of a text add up to the tally of the whole, in any order.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from powerinfer_toolkit.artifact import Manifest, new_file
from powerinfer_toolkit.errors import PiError
from powerinfer_toolkit.gguf_format import COVERAGE_POINTS, UNION_WINDOWS

KIND = "activation_statistics"
FILE_NAME = "statistics.safetensors"
EXCLUDED = "position 0, BOS and padding"
ALWAYS_ON_SHARE = 0.95  # of the tokens
HOT_SHARE = 0.8  # of the activations

Counts = NDArray[np.int64]
Shares = NDArray[np.float64]


class LayerSums(NamedTuple):
    """What one layer did over some tokens; numpy or torch, whatever fired was.

    Shapes: `counts` [n_ff]; `both` and `either`: neurons that fire at both, and at either of two consecutive
    tokens; `unions`, one for each of UNION_WINDOWS: neurons that fire in a whole window, summed over windows.
    """

    counts: Any
    both: Any
    either: Any
    unions: list[Any]


def coverage_curves(counts: NDArray[Any]) -> NDArray[np.float32]:
    """Return the share of all activations that the hottest i/128 of a layer's neurons carry, [n_layers, 129].

    `counts` [n_layers, n_ff] are activation counts or rates. Where i/128 of the neurons is no whole number, the
    curve is interpolated linearly.
    """
    n_layers, n_ff = counts.shape
    falling = -np.sort(-counts.astype(np.float64), axis=1)
    carried = np.cumsum(np.pad(falling, ((0, 0), (1, 0))), axis=1)
    points = np.linspace(0.0, n_ff, COVERAGE_POINTS)
    curves = [np.interp(points, np.arange(n_ff + 1), row / row[-1]) for row in carried]
    return np.stack(curves).astype(np.float32).reshape(n_layers, COVERAGE_POINTS)


def layer_sums(fired: Any, counted: Any | None = None) -> LayerSums:  # noqa: ANN401 - numpy or torch
    """Sum one layer's fired [n_sequences, n_positions, n_ff] where counted [n_sequences, n_positions]; both bool.

    Positions are consecutive and the first one is position 1 of a sequence, or 1 + a multiple of 64. None
    counts all of them, which takes half the passes over memory. Works on numpy arrays and on torch tensors.
    """
    if counted is not None:
        fired = fired & counted[..., None]
    counts = fired.sum((0, 1))
    unions, joined, whole = [], fired, counted
    for _ in UNION_WINDOWS:  # each is twice the one before
        joined, whole = _join_neighbours(joined, whole)
        unions.append(_total(joined, whole))
    others = _join_neighbours(fired[:, 1:], None if counted is None else counted[:, 1:])
    either = unions[0] + _total(
        *others
    )  # pairs that begin at the first position, and at the second
    return LayerSums(counts, _pair_members(fired, counted, counts) - either, either, unions)


def _join_neighbours(fired: Any, whole: Any | None) -> tuple[Any, Any | None]:  # noqa: ANN401
    n = fired.shape[1] // 2 * 2
    joined = fired[:, 0:n:2] | fired[:, 1:n:2]
    return joined, None if whole is None else whole[:, 0:n:2] & whole[:, 1:n:2]


def _total(fired: Any, whole: Any | None) -> Any:  # noqa: ANN401
    return (fired if whole is None else fired & whole[..., None]).sum()


def _pair_members(fired: Any, counted: Any | None, counts: Any) -> Any:  # noqa: ANN401
    """Return the neurons that fire at one token plus those at the next, summed over consecutive pairs."""
    if counted is None:  # every position is in two pairs, but for the first and the last one
        return 2 * counts.sum() - fired[:, 0].sum() - fired[:, -1].sum()
    n_fired = fired.sum(-1)
    pairs = counted[:, 1:] & counted[:, :-1]
    return ((n_fired[:, 1:] + n_fired[:, :-1]) * pairs).sum()


def window_counts(counted: Any) -> list[Any]:  # noqa: ANN401
    """Return the number of whole windows of each of UNION_WINDOWS in counted [n_sequences, n_positions]."""
    sums = []
    for _ in UNION_WINDOWS:
        n = counted.shape[1] // 2 * 2
        counted = counted[:, 0:n:2] & counted[:, 1:n:2]
        sums.append(counted.sum())
    return sums


@dataclass
class Tally:
    """Integer sums over all counted tokens; all arrays are int64.

    `counts` [n_layers, n_ff]: tokens at which a neuron fired. `both`, `either` [n_layers] and `unions`
    [n_layers, 6]: as in LayerSums. `windows` [6]: whole windows. `tokens` [1].
    """

    counts: Counts
    both: Counts
    either: Counts
    unions: Counts
    windows: Counts
    tokens: Counts

    @classmethod
    def zeros(cls, n_layers: int, n_ff: int) -> Self:
        """Return the tally of no tokens."""
        n_windows = len(UNION_WINDOWS)
        shapes = (
            (n_layers, n_ff),
            (n_layers,),
            (n_layers,),
            (n_layers, n_windows),
            (n_windows,),
            (1,),
        )
        return cls(*(np.zeros(shape, np.int64) for shape in shapes))

    def arrays(self) -> dict[str, Counts]:
        """Return the arrays by their names in a file."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def add(self, other: Tally) -> None:
        """Add the tally of other tokens of the same model."""
        for name, array in self.arrays().items():
            array += getattr(other, name)

    def add_layer(self, layer: int, sums: LayerSums) -> None:
        """Add one layer's sums of numpy arrays."""
        self.counts[layer] += sums.counts
        self.both[layer] += sums.both
        self.either[layer] += sums.either
        self.unions[layer] += np.asarray(sums.unions)

    def add_tokens(self, counted: NDArray[np.bool_]) -> None:
        """Add the number of tokens and of windows of counted [n_sequences, n_positions]."""
        self.tokens += counted.sum()
        self.windows += np.asarray(window_counts(counted))


@dataclass(frozen=True)
class ActivationStatistics:
    """A tally and what follows from it, with the manifest of its making.

    `in_file_order`: neurons are numbered as in a hot-first model file whose permutation was not at hand.
    """

    tally: Tally
    manifest: Manifest
    in_file_order: bool = False

    @property
    def n_tokens(self) -> int:
        """Counted tokens."""
        return int(self.tally.tokens[0])

    def zero_share(self) -> Shares:
        """Return the mean share of activations that are 0, [n_layers]."""
        share: Shares = 1.0 - self.frequency().mean(axis=1)
        return share

    def frequency(self) -> Shares:
        """Return the share of the tokens at which each neuron fired, [n_layers, n_ff]."""
        return self.tally.counts / max(self.n_tokens, 1)

    def union_density(self) -> Shares:
        """Return the mean share of neurons that fire within 2, 4, ... 64 tokens, [n_layers, 6]; NaN without one."""
        n_ff = self.tally.counts.shape[1]
        with np.errstate(invalid="ignore"):
            density: Shares = self.tally.unions / (self.tally.windows * float(n_ff))
        return density

    def overlap(self) -> Shares:
        """Return neurons active at both over those active at either of two consecutive tokens, [n_layers]."""
        return self.tally.both / np.maximum(self.tally.either, 1)

    def dead(self) -> Counts:
        """Return how many neurons never fired, [n_layers]."""
        dead: Counts = np.count_nonzero(self.tally.counts == 0, axis=1)
        return dead

    def always_on(self) -> Counts:
        """Return how many neurons fired at 95% of the tokens or more, [n_layers]."""
        on: Counts = np.count_nonzero(self.frequency() >= ALWAYS_ON_SHARE, axis=1)
        return on

    def hot_share(self) -> Shares:
        """Return the least share of a layer's neurons that carries 80% of its activations, [n_layers]."""
        falling = -np.sort(-self.tally.counts, axis=1)
        carried = np.cumsum(falling, axis=1)
        enough = carried >= HOT_SHARE * carried[:, -1:]
        share: Shares = (enough.argmax(axis=1) + 1) / carried.shape[1]
        return share

    def counts_sha256(self) -> str:
        """Return the hash of the little-endian counts, as powerinfer.statistics.sha256 has it."""
        return hashlib.sha256(self.tally.counts.astype("<i8").tobytes()).hexdigest()

    def save(self, path: Path, *, force: bool = True) -> None:
        """Write a safetensors file: the tally's arrays, derived shares, and the manifest in its metadata."""
        metadata = {
            "manifest": self.manifest.to_json(),
            "tokens": str(self.n_tokens),
            "sha256": self.counts_sha256(),
            "excluded": EXCLUDED,
            "neuron_order": "file" if self.in_file_order else "original",
        }
        shares = {
            "union_density": self.union_density(),
            "zero_share": self.zero_share(),
            "overlap": self.overlap(),
            "hot_share": self.hot_share(),
        }
        arrays: dict[str, NDArray[Any]] = dict(self.tally.arrays())
        arrays |= {name: share.astype(np.float32) for name, share in shares.items()}
        arrays |= {"dead": self.dead(), "always_on": self.always_on()}
        with new_file(path, force=force) as temporary:
            temporary.write_bytes(save(arrays, metadata))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what save() wrote; PiError for anything else. A directory stands for FILE_NAME in it."""
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise PiError(f"{path} does not exist", hint="make it with pi-profile MODEL OUT")
        try:
            with safe_open(path, "np") as file:
                metadata = file.metadata() or {}
                arrays = [file.get_tensor(field.name) for field in fields(Tally)]
        except (SafetensorError, OSError) as failure:
            raise PiError(
                f"{path} holds no activation statistics: {failure}",
                hint="make it with pi-profile MODEL OUT",
            ) from failure
        manifest = Manifest.from_json(metadata.get("manifest", ""), where=path)
        return cls(Tally(*arrays), manifest, metadata.get("neuron_order") == "file")
