"""What predictors do on held-out text: perplexity under their masks, and what each layer finds, reads and loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from powerinfer_toolkit.train_predictor.capture import GATE_SHARE
from powerinfer_toolkit.train_predictor.masking import (
    SINK_POSITIONS,
    masked,
    mean_loss,
    perplexity_loss,
)
from powerinfer_toolkit.train_predictor.network import Predictor
from powerinfer_toolkit.train_predictor.texts import Blocks
from powerinfer_toolkit.train_predictor.training import Context

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class Measures:
    """Sums over masked positions by layer [n_layers], and the two mean losses in nats.

    `mass` is the sum of (activation * |down|)^2 over all neurons, `lost` over those that were dropped.
    """

    hits: Shares
    predicted: Shares
    fires: Shares
    lost: Shares
    mass: Shares
    neurons: float  # neurons of a layer, times positions
    parameter_share: Shares  # of the predictor, of the layer's FFN
    masked_loss: float
    unmasked_loss: float

    def perplexity_loss(self) -> float:
        """Return the relative rise of the perplexity, 0.01 for 1%."""
        return perplexity_loss(self.masked_loss, self.unmasked_loss)

    def byte_share(self) -> Shares:
        """Return F by layer: bytes read relative to dense, p + d_predicted / 3 + 2/3 d_hit."""
        read = GATE_SHARE * self.predicted + (1 - GATE_SHARE) * self.hits
        return self.parameter_share + read / self.neurons

    def by_layer(self) -> dict[str, Shares]:
        """Return every measure by layer, all as shares."""
        return {
            "recall": self.hits / np.maximum(self.fires, 1),
            "precision": self.hits / np.maximum(self.predicted, 1),
            "predicted_density": self.predicted / self.neurons,
            "true_density": self.fires / self.neurons,
            "lost_mass": self.lost / np.maximum(self.mass, 1e-30),
            "parameters": self.parameter_share,
            "bytes": self.byte_share(),
        }

    def overall(self) -> dict[str, float]:
        """Return the measures over all layers; recall and precision of all neurons together."""
        return {
            "recall": float(self.hits.sum() / max(self.fires.sum(), 1)),
            "precision": float(self.hits.sum() / max(self.predicted.sum(), 1)),
            **{name: float(self.by_layer()[name].mean()) for name in _MEANS},
            "unmasked_perplexity": float(np.exp(self.unmasked_loss)),
            "masked_perplexity": float(np.exp(self.masked_loss)),
            "perplexity_loss": self.perplexity_loss(),
        }


_MEANS = ("predicted_density", "true_density", "lost_mass", "parameters", "bytes")


def evaluate(
    context: Context,
    predictors: Sequence[Predictor | None],
    blocks: Blocks,
    unmasked_loss: float,
) -> Measures:
    """Measure on `blocks` with masks as the runtime applies them; None is a layer that stays exact."""
    model, accelerator = context.model, context.accelerator
    names = ("hits", "predicted", "fires", "lost", "mass")
    sums = torch.zeros(len(names), model.n_layers, dtype=torch.float64, device=model.device)
    norms = [block.down.weight.float().norm(dim=0) for block in model.blocks]

    def add(layer: int, hidden: Tensor, kept: Tensor) -> None:
        hidden, kept = hidden[:, SINK_POSITIONS:], kept[:, SINK_POSITIONS:]
        fires = hidden != 0
        mass = (hidden.float() * norms[layer]).square()
        found = (fires & kept).sum(), kept.sum(), fires.sum(), (mass * ~kept).sum(), mass.sum()
        sums[:, layer] += torch.stack([value.double() for value in found])

    batch_size = context.settings.per_device_batch_size
    with masked(model, predictors, add):
        loss = mean_loss(model, blocks, batch_size, accelerator)
    found = accelerator.reduce(sums, "sum").cpu().numpy()
    ffn = 3 * model.n_embd * model.n_ff
    parameters = [0 if p is None else p.n_parameters for p in predictors]
    return Measures(
        **dict(zip(names, found, strict=True)),
        neurons=float(model.n_ff * len(blocks) * (blocks.shape[1] - SINK_POSITIONS)),
        parameter_share=np.array(parameters) / ffn,
        masked_loss=loss,
        unmasked_loss=unmasked_loss,
    )


def to_table(measures: Measures, ranks: Sequence[int]) -> str:
    """Return one line a layer and one for all; rank "exact" is a layer without a predictor."""
    by_layer = measures.by_layer()
    lines = [f"{'layer':>5} {'rank':>5} " + " ".join(f"{_short(name):>9}" for name in by_layer)]
    for layer, rank in enumerate(ranks):
        cells = " ".join(f"{values[layer]:>9.1%}" for values in by_layer.values())
        lines.append(f"{layer:>5} {rank or 'exact':>5} {cells}")
    overall = measures.overall()
    lines.append(f"{'all':>5} {'':>5} " + " ".join(f"{overall[name]:>9.1%}" for name in by_layer))
    lines.append(
        f"perplexity {overall['unmasked_perplexity']:.3f}, masked {overall['masked_perplexity']:.3f} "
        f"({overall['perplexity_loss']:+.2%}), position 0 exact; bytes: of the FFN, relative to dense"
    )
    return "\n".join(lines)


def _short(name: str) -> str:
    return name.replace("_density", "").replace("parameters", "params")


def to_record(measures: Measures) -> dict[str, Any]:
    """Return everything as plain values."""
    layers = {name: values.tolist() for name, values in measures.by_layer().items()}
    return {"overall": measures.overall(), "layers": layers}
