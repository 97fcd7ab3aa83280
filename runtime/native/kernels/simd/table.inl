// table.inl: the kernels of simd/ as one table. The including file has defined the vector vocabulary; a new
// instruction set is one more file that defines the names of avx2.cpp (and those that x86_int8.inl lists).

#pragma once

#include "attention.inl"
#include "dot_q8.inl"
#include "floats.inl"
#include "gemm.inl"
#include "k_quants.inl"
#include "q4_0.inl"
#include "q4_1.inl"
#include "q5_iq4.inl"
#include "q8_0.inl"
#include "rows.inl"
#include "unpacked.inl"
#include "vector.inl"

namespace {

template <typename Type>
constexpr pi_type_kernels float_type{dequantize<Type>, dot_f32<Type>, nullptr, nullptr, axpy<Type>};
template <typename Type>
constexpr pi_type_kernels block_type{dequantize<Type>, dot_f32<Type>, dot_q8<Type>, nullptr, axpy<Type>};

// Vector code for int8 activations only: in floats, a block is unpacked first.
template <typename Type>
constexpr pi_type_kernels vector_dot_type = unpacked_type<typename Type::Block>(dot_q8<Type>);
template <typename Type>
constexpr pi_type_kernels k_type = unpacked_type<typename Type::Block>(dot_q8_k<Type>);

constexpr pi_kernels make_table(const char *name, int (*usable)(void)) {
    return {
        .name = name,
        .usable = usable,
        .type = {float_type<F32>, float_type<F16>, float_type<BF16>, block_type<Q8_0>, block_type<Q4_0>,
                 block_type<Q4_1>, vector_dot_type<Q5_0>, vector_dot_type<Q5_1>, k_type<Q2_K>, k_type<Q3_K>,
                 k_type<Q4_K>, k_type<Q5_K>, k_type<Q6_K>, vector_dot_type<IQ4_NL>, vector_dot_type<MXFP4>,
                 unpacked_type<pi_block_nvfp4>(nullptr)},
        .quantize_q8 = quantize_q8,
        .rms_norm = rms_norm,
        .gated_silu = gated_silu,
        .gated_relu = gated_relu,
        .add = add,
        .rope = rope,
        .gemm_tile = gemm_tile,
        .gemm_panel = gemm_panel,
        .round_panel = nullptr,
        .round_weights = nullptr,
        .gemm_rounded = nullptr,
        .attend_f32 = attend<F32Value>,
        .attend_f16 = attend<F16Value>,
        .attend_rounded = nullptr,
        .to_half = to_half,
    };
}

} // namespace
