// neon_dotprod.cpp: the kernels of simd/ in NEON with the byte products of ARMv8.2 (FEAT_DotProd).
#include "cpu.h"
#include "kernels.h"

#include <arm_neon.h>
#include <math.h>
#include <stddef.h>

namespace {

inline int32x4_t add_products(int32x4_t sums, int8x16_t w, int8x16_t x) {
    return vdotq_s32(sums, w, x);
}

} // namespace

#include "simd/neon.inl"

#include "simd/neon_int8.inl"

#include "simd/table.inl"

const pi_kernels pi_kernels_neon_dotprod = make_table("neon_dotprod", pi_cpu_has_neon_dotprod);
