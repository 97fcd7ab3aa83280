// table.inl: the kernels of simd/ as one table. The including file has defined the vector vocabulary; a new
// instruction set is one more file that defines the names of avx2.cpp (and those that x86_int8.inl lists).

#pragma once

#include "attention.inl"
#include "dot_q8.inl"
#include "floats.inl"
#include "gemm.inl"
#include "q4_0.inl"
#include "q4_1.inl"
#include "q8_0.inl"
#include "rows.inl"
#include "unpacked.inl"
#include "vector.inl"

namespace {

template <typename Type>
constexpr pi_type_kernels float_type{dequantize<Type>, dot_f32<Type>, nullptr, axpy<Type>};
template <typename Type>
constexpr pi_type_kernels block_type{dequantize<Type>, dot_f32<Type>, dot_q8<Type>, axpy<Type>};

constexpr pi_kernels make_table(const char *name, int (*usable)(void)) {
    return {
        .name = name,
        .usable = usable,
        .type = {float_type<F32>, float_type<F16>, float_type<BF16>, block_type<Q8_0>, block_type<Q4_0>,
                 block_type<Q4_1>, unpacked_type<pi_block_q5_0>, unpacked_type<pi_block_q5_1>,
                 unpacked_type<pi_block_q2_k>, unpacked_type<pi_block_q3_k>, unpacked_type<pi_block_q4_k>,
                 unpacked_type<pi_block_q5_k>, unpacked_type<pi_block_q6_k>, unpacked_type<pi_block_iq4_nl>,
                 unpacked_type<pi_block_mxfp4>, unpacked_type<pi_block_nvfp4>},
        .quantize_q8 = quantize_q8,
        .rms_norm = rms_norm,
        .gated_silu = gated_silu,
        .gated_relu = gated_relu,
        .add = add,
        .rope = rope,
        .gemm_tile = gemm_tile,
        .gemm_panel = gemm_panel,
        .attend_f32 = attend<F32Value>,
        .attend_f16 = attend<F16Value>,
        .to_half = to_half,
    };
}

} // namespace
