"""The types of pi.h for ctypes: pointers, handles, callbacks and structs."""

from __future__ import annotations

import ctypes as ct

FloatPtr = ct.POINTER(ct.c_float)
Int32Ptr = ct.POINTER(ct.c_int32)
UInt32Ptr = ct.POINTER(ct.c_uint32)
UInt64Ptr = ct.POINTER(ct.c_uint64)
BytePtr = ct.POINTER(ct.c_uint8)
Handle = ct.c_void_p  # pi_model, pi_engine, pi_sampler
HandlePtr = ct.POINTER(Handle)
StringPtr = ct.POINTER(ct.c_char_p)
LogFn = ct.CFUNCTYPE(None, ct.c_int32, ct.c_char_p, ct.c_void_p)
AbortFn = ct.CFUNCTYPE(ct.c_int32, ct.c_void_p)


class _Sized(ct.Structure):
    """A struct whose first field says how large the caller's version of it is."""

    def __init__(self, **fields: object) -> None:
        super().__init__(size=ct.sizeof(type(self)), **fields)


class Value(_Sized):
    """pi_value: a metadata value inside the mapped file."""

    _fields_ = (
        ("size", ct.c_uint32),
        ("type", ct.c_uint32),
        ("element_type", ct.c_uint32),
        ("reserved", ct.c_uint32),
        ("count", ct.c_uint64),
        ("n_bytes", ct.c_uint64),
        ("data", ct.c_void_p),
    )


class TensorInfo(_Sized):
    """pi_tensor_info: a tensor inside the mapped file, contiguous dimension first."""

    _fields_ = (
        ("size", ct.c_uint32),
        ("type", ct.c_uint32),
        ("n_dims", ct.c_uint32),
        ("reserved", ct.c_uint32),
        ("shape", ct.c_uint64 * 4),
        ("n_bytes", ct.c_uint64),
        ("data", ct.c_void_p),
    )


class ModelConfig(_Sized):
    """pi_model_config: the shapes and constants of the model."""

    _fields_ = (
        ("size", ct.c_uint32),
        ("n_layers", ct.c_uint32),
        ("n_embd", ct.c_uint32),
        ("n_ff", ct.c_uint32),
        ("n_vocab", ct.c_uint32),
        ("n_heads", ct.c_uint32),
        ("n_kv_heads", ct.c_uint32),
        ("head_dim", ct.c_uint32),
        ("n_rot", ct.c_uint32),
        ("n_ctx_train", ct.c_uint32),
        ("sliding_window", ct.c_uint32),
        ("activation", ct.c_uint32),
        ("sparse_layout", ct.c_uint32),
        ("has_predictors", ct.c_uint32),
        ("sink_positions", ct.c_uint32),
        ("tied_head", ct.c_uint32),
        ("float32_weights", ct.c_uint32),
        ("activation_threshold", ct.c_float),
        ("sparse_threshold", ct.c_float),
        ("rms_eps", ct.c_float),
        ("rope_theta", ct.c_float),
        ("weight_bytes", ct.c_uint64),
    )


class Unit(ct.Structure):
    """pi_unit: a piece of a layer and where it is used from."""

    _fields_ = (
        ("kind", ct.c_uint32),
        ("layer", ct.c_uint32),
        ("begin", ct.c_uint32),
        ("end", ct.c_uint32),
        ("placement", ct.c_uint32),
    )


class Tier(ct.Structure):
    """pi_tier: the schedule of steps with at most max_tokens new tokens."""

    _fields_ = (("max_tokens", ct.c_uint32), ("ffn_mode", ct.c_uint32))


class Plan(_Sized):
    """pi_plan: everything an engine is created from."""

    _fields_ = (
        ("size", ct.c_uint32),
        ("n_units", ct.c_uint32),
        ("units", ct.POINTER(Unit)),
        ("tiers", ct.POINTER(Tier)),
        ("n_tiers", ct.c_uint32),
        ("n_threads", ct.c_uint32),
        ("max_batch_tokens", ct.c_uint32),
        ("n_sequences", ct.c_uint32),
        ("n_context", ct.c_uint32),
        ("n_kv_pages", ct.c_uint32),
        ("kv_type", ct.c_uint32),
        ("activation_type", ct.c_uint32),
        ("predict_all", ct.c_uint32),
        ("sparse_threshold", ct.c_float),
        ("isa", ct.c_char_p),
        ("vram_budget_bytes", ct.c_uint64),
        ("predict_split_only", ct.c_uint32),
        ("handover", ct.c_uint32),
        ("stream_tokens", ct.c_uint32),
        ("stream_piece_bytes", ct.c_uint32),
    )


class Batch(_Sized):
    """pi_batch: the new tokens of one step."""

    _fields_ = (
        ("size", ct.c_uint32),
        ("n_tokens", ct.c_uint32),
        ("tokens", Int32Ptr),
        ("embeddings", FloatPtr),
        ("positions", Int32Ptr),
        ("sequences", Int32Ptr),
        ("tree_mask", UInt64Ptr),
        ("want_logits", BytePtr),
        ("targets", Int32Ptr),
        ("ffn_rules", BytePtr),
        ("n_position_axes", ct.c_uint32),
        ("reserved", ct.c_uint32),
        ("want_top", UInt32Ptr),
    )


class Stats(_Sized):
    """pi_stats: what the engine has done since its creation or the last reset."""

    _fields_ = (
        ("size", ct.c_uint32),
        ("n_threads", ct.c_uint32),
        ("n_tokens", ct.c_uint64),
        ("neurons_total", ct.c_uint64),
        ("neurons_active", ct.c_uint64),
        ("neurons_guessed", ct.c_uint64),
        ("kv_bytes", ct.c_uint64),
        ("scratch_bytes", ct.c_uint64),
        ("isa", ct.c_char_p),
        ("device", ct.c_char_p),
        ("device_bytes", ct.c_uint64),
        ("device_context_bytes", ct.c_uint64),
        ("device_launches", ct.c_uint64),
        ("device_graph_launches", ct.c_uint64),
        ("pinned_bytes", ct.c_uint64),
        ("handover", ct.c_uint32),
        ("reserved", ct.c_uint32),
    )


class LayerTimes(ct.Structure):
    """pi_layer_times: what the sides of a layer did, in nanoseconds summed over steps."""

    _fields_ = (
        ("n_steps", ct.c_uint64),
        ("cpu_ns", ct.c_uint64),
        ("cpu_wait_ns", ct.c_uint64),
        ("gpu_ns", ct.c_uint64),
        ("pull_ns", ct.c_uint64),
        ("gpu_wait_ns", ct.c_uint64),
        ("handover_ns", ct.c_uint64),
    )


class GpuDevice(_Sized):
    """pi_gpu_device: a GPU and its memory."""

    _fields_ = (
        ("size", ct.c_uint32),
        ("capability", ct.c_int32),
        ("n_processors", ct.c_uint32),
        ("reserved", ct.c_uint32),
        ("name", ct.c_char_p),
        ("total_bytes", ct.c_uint64),
        ("free_bytes", ct.c_uint64),
        ("context_bytes", ct.c_uint64),
    )


class SamplerParams(_Sized):
    """pi_sampler_params: how the next token is drawn."""

    _fields_ = (
        ("size", ct.c_uint32),
        ("top_k", ct.c_int32),
        ("seed", ct.c_uint64),
        ("temperature", ct.c_float),
        ("top_p", ct.c_float),
        ("min_p", ct.c_float),
        ("repeat_penalty", ct.c_float),
        ("repeat_last_n", ct.c_int32),
        ("reserved", ct.c_uint32),
    )


# Header name -> ctypes struct.
STRUCTS: dict[str, type[ct.Structure]] = {
    "pi_value": Value,
    "pi_tensor_info": TensorInfo,
    "pi_model_config": ModelConfig,
    "pi_unit": Unit,
    "pi_tier": Tier,
    "pi_plan": Plan,
    "pi_batch": Batch,
    "pi_stats": Stats,
    "pi_layer_times": LayerTimes,
    "pi_gpu_device": GpuDevice,
    "pi_sampler_params": SamplerParams,
}
