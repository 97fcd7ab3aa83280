// neon_dotprod.cpp: the kernels of simd/ in NEON with the products of bytes of ARMv8.2 (FEAT_DotProd).
#include "cpu.h"
#include "kernels.h"

#include <arm_neon.h>
#include <math.h>
#include <stddef.h>

namespace {

inline int32x4_t add_products(int32x4_t sums, int8x16_t w, int8x16_t x) {
    return vdotq_s32(sums, w, x);
}

// Four bytes of every row in each vector.
inline void pack_cell(const int8x16_t rows[4], int8x16_t out[4]) {
    int32x4_t words[4];
    for (int r = 0; r < 4; ++r)
        words[r] = vreinterpretq_s32_s8(rows[r]);
    const int64x2_t even_ab = vreinterpretq_s64_s32(vtrn1q_s32(words[0], words[1]));
    const int64x2_t odd_ab = vreinterpretq_s64_s32(vtrn2q_s32(words[0], words[1]));
    const int64x2_t even_cd = vreinterpretq_s64_s32(vtrn1q_s32(words[2], words[3]));
    const int64x2_t odd_cd = vreinterpretq_s64_s32(vtrn2q_s32(words[2], words[3]));
    out[0] = vreinterpretq_s8_s64(vtrn1q_s64(even_ab, even_cd));
    out[1] = vreinterpretq_s8_s64(vtrn1q_s64(odd_ab, odd_cd));
    out[2] = vreinterpretq_s8_s64(vtrn2q_s64(even_ab, even_cd));
    out[3] = vreinterpretq_s8_s64(vtrn2q_s64(odd_ab, odd_cd));
}

// acc[t]: the rows of token t
inline void multiply_cell(const int8x16_t w[4], const int8x16_t x[4], int32x4_t acc[4]) {
    for (int t = 0; t < 4; ++t) {
        acc[t] = vdotq_laneq_s32(acc[t], w[0], x[t], 0);
        acc[t] = vdotq_laneq_s32(acc[t], w[1], x[t], 1);
        acc[t] = vdotq_laneq_s32(acc[t], w[2], x[t], 2);
        acc[t] = vdotq_laneq_s32(acc[t], w[3], x[t], 3);
    }
}

inline int32x4_t sums_of_token(const int32x4_t acc[4], int64_t t) {
    return acc[t];
}

} // namespace

#include "simd/neon.inl"

#include "simd/neon_int8.inl"

#include "simd/table.inl"

#include "simd/neon_many_q8.inl"

const pi_kernels pi_kernels_neon_dotprod = with_many_q8(make_table("neon_dotprod", pi_cpu_has_neon_dotprod));
