// neon_i8mm.cpp: the kernels of simd/ in NEON with the byte matrix products of ARMv8.6 (FEAT_I8MM) as well.
#include "cpu.h"
#include "kernels.h"

#include <arm_neon.h>
#include <math.h>
#include <stddef.h>

namespace {

inline int32x4_t add_products(int32x4_t sums, int8x16_t w, int8x16_t x) {
    return vdotq_s32(sums, w, x);
}

// Eight bytes of a and eight of b: the first or the second ones.
inline int8x16_t first_halves(int8x16_t a, int8x16_t b) {
    return vcombine_s8(vget_low_s8(a), vget_low_s8(b));
}
inline int8x16_t second_halves(int8x16_t a, int8x16_t b) {
    return vcombine_s8(vget_high_s8(a), vget_high_s8(b));
}

// Rows 0 and 1, then rows 2 and 3: eight columns, then the other eight.
inline void pack_cell(const int8x16_t rows[4], int8x16_t out[4]) {
    out[0] = first_halves(rows[0], rows[1]);
    out[1] = second_halves(rows[0], rows[1]);
    out[2] = first_halves(rows[2], rows[3]);
    out[3] = second_halves(rows[2], rows[3]);
}

// acc[2 i + j]: rows 2 j and 2 j + 1, of each the tokens 2 i and 2 i + 1
inline void multiply_cell(const int8x16_t w[4], const int8x16_t x[4], int32x4_t acc[4]) {
    for (int i = 0; i < 2; ++i) {
        const int8x16_t first = first_halves(x[2 * i], x[2 * i + 1]);
        const int8x16_t second = second_halves(x[2 * i], x[2 * i + 1]);
        for (int j = 0; j < 2; ++j) {
            acc[2 * i + j] = vmmlaq_s32(acc[2 * i + j], w[2 * j], first);
            acc[2 * i + j] = vmmlaq_s32(acc[2 * i + j], w[2 * j + 1], second);
        }
    }
}

inline int32x4_t sums_of_token(const int32x4_t acc[4], int64_t t) {
    const int64_t i = t / 2 * 2;
    return t % 2 == 0 ? vuzp1q_s32(acc[i], acc[i + 1]) : vuzp2q_s32(acc[i], acc[i + 1]);
}

} // namespace

#include "simd/neon.inl"

#include "simd/neon_int8.inl"

#include "simd/table.inl"

#include "simd/neon_many_q8.inl"

const pi_kernels pi_kernels_neon_i8mm = with_many_q8(make_table("neon_i8mm", pi_cpu_has_neon_i8mm));
