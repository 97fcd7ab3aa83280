"""How far a model file may be from its checkpoint, by the types in it.

Arithmetic and quantisation are told apart. *Arithmetic* is what is left when transformers computes with the
file's own weights: it does not depend on how coarse they are, and a fault of a converter or an engine is far
above it. *Quantisation* is the distance from the checkpoint, and is expected to grow with the types' errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from powerinfer_toolkit.gguf_format import TensorType
from powerinfer_toolkit.runtime.plan.plan import Plan
from powerinfer_toolkit.runtime.plan.shape import ModelShape

# |rounded - x| / |x| of normal numbers, measured; MXFP4 and NVFP4 by the steps of their 4-bit floats
ROUNDING_ERROR = {
    TensorType.F32: 0.0,
    TensorType.F16: 2.1e-4,
    TensorType.BF16: 1.7e-3,
    TensorType.Q8_0: 5.4e-3,
    TensorType.Q6_K: 0.018,
    TensorType.Q5_K: 0.037,
    TensorType.Q5_1: 0.038,
    TensorType.Q5_0: 0.043,
    TensorType.Q4_K: 0.072,
    TensorType.IQ4_NL: 0.077,
    TensorType.Q4_1: 0.079,
    TensorType.Q4_0: 0.086,
    TensorType.NVFP4: 0.1,
    TensorType.MXFP4: 0.13,
    TensorType.Q3_K: 0.151,
    TensorType.Q2_K: 0.297,
}
HEAVY_TAILS = 3.0  # real rows have outliers, which widen the steps of their blocks
TORCH_DTYPES = {  # what the checkpoint's weights are rounded to
    "float32": TensorType.F32,
    "bfloat16": TensorType.BF16,
    "float16": TensorType.F16,
}
FLOAT32_ERROR = 1e-6  # of a weight that was float64, or that bfloat16 arithmetic did not touch
# A relative error of the weights scatters log-probabilities by so many times itself, in nats: a dozen matrices one
# after the other, each with noise of its own, and logits that differ by several nats. Measured on SmolLM2-135M: 9
# for Q8_0 and for Q4_0; larger models bear more.
GAIN = 16.0

F32_LOGITS = 1e-5  # eps x sqrt(n) x depth, doubled for two computations
F32_DEEP = 2.0**-23  # times sqrt(n_ff) and the number of layers, where that is more
F16_KV_LOGITS = 2e-3  # keys and values round at 2^-12 on average, once in every layer
INT8_LOGITS = 4e-2  # blocks of 32 activations in int8
INT8_KL = 5e-3  # nats: log-probabilities that scatter by 0.1
REDUCED_LOGITS = 5e-2  # checkpoint computed in bfloat16 or float16
PREDICTED_PERPLEXITY = 0.01  # relative
SWAP_DEVIATIONS = (
    6.0  # a difference of two logits is off by sqrt(2) deviations; so many are allowed
)
SCATTER_DEVIATIONS = 4.0  # of a mean over tokens


@dataclass(frozen=True)
class Limits:
    """The limits of one file under one plan; KL in nats, the others relative."""

    logits: float  # relative L2 from transformers with the file's weights
    kl: float  # from the same
    quantisation_kl: float  # from the checkpoint
    weights: Mapping[str, float]  # relative L2 of a tensor from the checkpoint's, by type

    @classmethod
    def of(
        cls, shape: ModelShape, plan: Plan, elements: Mapping[str, int], torch_dtype: str
    ) -> Limits:
        """From the plan, and the number of matrix elements of each type in the file."""
        types = {TensorType[name] for name in elements}
        logits = max(F32_LOGITS, F32_DEEP * math.sqrt(shape.n_ff) * shape.n_layers)
        kl = _kl_of(logits)
        if plan.kv_type is not TensorType.F32:
            logits += F16_KV_LOGITS
            kl = _kl_of(logits)
        if plan.activation_type is not TensorType.F32 and types - _FLOATS:
            logits += INT8_LOGITS
            kl += INT8_KL
        if torch_dtype != "float32":
            logits += REDUCED_LOGITS
            kl += INT8_KL
        total = sum(elements.values())
        square = sum(n * ROUNDING_ERROR[TensorType[name]] ** 2 for name, n in elements.items())
        rounded = ROUNDING_ERROR[TORCH_DTYPES[torch_dtype]]
        weights = {
            t.name: HEAVY_TAILS * (ROUNDING_ERROR[t] + rounded) + FLOAT32_ERROR
            for t in types | {TensorType.F32}
        }
        return cls(logits, kl, kl + GAIN**2 * square / total / 2, weights)


def perplexity_limit(kl: float, n_tokens: int) -> float:
    """Return the relative difference of two perplexities that a mean KL of `kl` nats allows.

    Log-probabilities then scatter by sqrt(2 kl), their mean over n_tokens by that over sqrt(n_tokens).
    """
    return math.expm1(kl + SCATTER_DEVIATIONS * math.sqrt(2 * kl / n_tokens))


_FLOATS = {TensorType.F32, TensorType.F16, TensorType.BF16}
_LOGITS_RMS = 10.0  # about their mean, generously


def _kl_of(relative_l2: float) -> float:
    """Return half the variance of log-probabilities that an error of all logits means."""
    return (relative_l2 * _LOGITS_RMS) ** 2 / 2
