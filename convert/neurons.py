"""Where the neurons of a source go in the output: permutations of every layer, composed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from powerinfer_toolkit.gguf_format import NeuronOrder

Order = NDArray[np.int32]  # [n_layers, n_ff]


@dataclass(frozen=True)
class NeuronPlaces:
    """The order of an output's neurons.

    `original` has the checkpoint's neuron at every place of the output, None: the same number, or nobody has
    to know. `places` has the source's place of that neuron, None: the same place.
    """

    kind: NeuronOrder
    original: Order | None
    places: Order | None

    def of_layer(self, layer: int | None) -> Order | None:
        """Return the source's place at every place of a layer, None where nothing moves."""
        return None if self.places is None or layer is None else self.places[layer]


def compose(source: Order | None, wanted: Order | None) -> Order | None:
    """Return the source's place of every neuron in the wanted order, None where nothing moves.

    Both orders have the checkpoint's neuron at every place; None is the checkpoint's own order. With s and w
    the two permutations of a layer, place k of the output takes place s^-1(w(k)) of the source.
    """
    if source is None:
        return wanted
    inverse = np.argsort(source, axis=1).astype(np.int32)
    places = inverse if wanted is None else np.take_along_axis(inverse, wanted, axis=1)
    unmoved = (places == np.arange(places.shape[1])).all()
    return None if unmoved else places
