// avx512_bf16.cpp: AVX-512 with BF16: attention of prompts in products of bfloat16.
#include "cpu.h"
#include "kernels.h"

#include <immintrin.h>
#include <math.h>
#include <stddef.h>

#include "simd/avx512.inl"

#include "simd/attention_bf16.inl"

namespace {

constexpr pi_kernels with_rounded_attention(pi_kernels table) {
    table.attend_rounded = attend_rounded;
    return table;
}

} // namespace

const pi_kernels pi_kernels_avx512_bf16 =
    with_rounded_attention(make_avx512_table("avx512_bf16", pi_cpu_has_avx512_bf16));
