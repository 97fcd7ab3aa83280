"""Forward and backward pass of a batch as one CUDA graph: a small model computes faster than Python launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from powerinfer_toolkit.errors import PiError

WARM_UPS = 3  # passes that compile, choose kernels and fill caches before the recording
WHOLE_BLOCKS = "sdpa_whole_blocks"

Compute = Callable[[Tensor, Tensor], dict[str, Tensor]]


class GraphedPass:
    """Records `compute` and its backward pass once, then replays them on new tokens.

    compute(ids [batch, tokens], sparsity weight []) returns a dict of tensors with the differentiable "loss".
    Every replay leaves the gradients in `.grad` and writes results and gradients over those of the replay
    before. One process, no accumulation: both would change gradients outside the recording.
    """

    def __init__(self, compute: Compute, model: nn.Module, ids: Tensor) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.ids, self.weight = ids.clone(), torch.zeros((), device=ids.device)
        with torch.random.fork_rng(devices=[ids.device]):  # a resumed run draws what it would have
            self._warm_up(compute)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.parts = self._pass(compute)
        self.gradients = [p.grad for p in self.parameters]

    def _warm_up(self, compute: Compute) -> None:
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._pass(compute)
                for parameter in self.parameters:
                    parameter.grad = None
        here.wait_stream(side)

    def _pass(self, compute: Compute) -> dict[str, Tensor]:
        parts = compute(self.ids, self.weight)
        parts["loss"].backward()
        return {name: part.detach() for name, part in parts.items()}

    def run(self, ids: Tensor, sparsity_weight: float) -> dict[str, Tensor]:
        """Return the parts for ids [batch, tokens], valid until the next run; gradients are in `.grad`."""
        self.ids.copy_(ids)
        self.weight.fill_(sparsity_weight)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.parts


def whole_block_attention(config: Any, block_tokens: int) -> str:  # noqa: ANN401
    """Return the name of an attention for blocks without padding, which looks at no values for a mask.

    transformers' sdpa reads positions back from the device to see whether a mask is needed. Raises PiError
    for a model whose window is shorter than a block.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    window = getattr(config, "sliding_window", None)
    if window is not None and window < block_tokens:
        raise PiError(
            f"cuda_graph: the model attends to {window} tokens, a block has {block_tokens}",
            hint=f"lower max_length to {window}, or set cuda_graph to false",
        )
    AttentionInterface.register(WHOLE_BLOCKS, sdpa_attention_forward)
    return WHOLE_BLOCKS
