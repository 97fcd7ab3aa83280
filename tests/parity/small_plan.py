"""A machine and the shape of a small sparse model, to plan for."""

from powerinfer_toolkit.gguf_format import Activation
from powerinfer_toolkit.runtime.plan.machine import Machine
from powerinfer_toolkit.runtime.plan.shape import ModelShape

MACHINE = Machine(n_cores=4, n_cpus=8, available_bytes=2**36)
SHAPE = ModelShape(
    n_layers=3,
    n_embd=64,
    n_ff=160,
    n_vocab=300,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    n_rot=16,
    n_ctx_train=8192,
    sliding_window=0,
    activation=Activation.RELU,
    sparse_layout=True,
    has_predictors=True,
    sink_positions=1,
    tied_head=False,
    float32_weights=False,
    activation_threshold=0.0,
    sparse_threshold=0.0,
    rms_eps=1e-5,
    rope_theta=1e4,
    weight_bytes=10**6,
    predictor_kind="mlp",
)
