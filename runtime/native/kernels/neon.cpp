// neon.cpp: the kernels of simd/ in the NEON that every 64 bit ARM processor has.
#include "kernels.h"

#include <arm_neon.h>
#include <math.h>
#include <stddef.h>

namespace {

// Two products of bytes fit int16: 128 * 127 * 2.
inline int32x4_t add_products(int32x4_t sums, int8x16_t w, int8x16_t x) {
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
    return vpadalq_s16(sums, vmlal_high_s8(low, w, x));
}

int usable() {
    return 1;
}

} // namespace

#include "simd/neon.inl"

#include "simd/neon_int8.inl"

#include "simd/table.inl"

const pi_kernels pi_kernels_neon = make_table("neon", usable);
