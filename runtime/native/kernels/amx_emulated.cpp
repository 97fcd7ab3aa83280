// amx_emulated.cpp: the table of amx.cpp over tiles in software, so that a processor without AMX can test it.
#include "cpu.h"
#include "kernels.h"

#include <immintrin.h>
#include <math.h>
#include <stddef.h>

#include "simd/avx512.inl"

namespace {

// Eight tiles of 16 rows of 64 bytes. Their contents after tiles_begin() are zeros, as TILECFG's load leaves
// them.
struct Tiles {
    uint8_t bytes[8][16][64];
};

thread_local Tiles tiles;

inline void tiles_begin() {
    tiles = {};
}
inline void tiles_end() {
    tiles = {};
}

template <int t>
inline void tile_load(const void *p, int64_t stride) {
    for (int64_t row = 0; row < 16; ++row)
        __builtin_memcpy(tiles.bytes[t][row], static_cast<const char *>(p) + row * stride, 64);
}
template <int t>
inline void tile_store(void *p, int64_t stride) {
    for (int64_t row = 0; row < 16; ++row)
        __builtin_memcpy(static_cast<char *>(p) + row * stride, tiles.bytes[t][row], 64);
}

template <int t>
inline void tile_zero() {
    __builtin_memset(tiles.bytes[t], 0, sizeof tiles.bytes[t]);
}

// A bfloat16 of a row as a float; subnormal numbers count as 0.
inline float element(const uint8_t row[64], int64_t i) {
    uint32_t bits = static_cast<uint32_t>(row[2 * i] | row[2 * i + 1] << 8) << 16;
    if ((bits & 0x7f800000) == 0)
        bits &= 0x80000000;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// TDPBF16PS as Intel's manual has it: the even and the odd products are summed apart, and both sums are added
// up at the end.
template <int c, int a, int b>
inline void tile_multiply() {
    for (int64_t m = 0; m < 16; ++m) {
        float even[16] = {}, odd[16] = {};
        for (int64_t k = 0; k < 16; ++k) {
            const float first = element(tiles.bytes[a][m], 2 * k);
            const float second = element(tiles.bytes[a][m], 2 * k + 1);
            for (int64_t n = 0; n < 16; ++n) {
                even[n] = __builtin_fmaf(first, element(tiles.bytes[b][k], 2 * n), even[n]);
                odd[n] = __builtin_fmaf(second, element(tiles.bytes[b][k], 2 * n + 1), odd[n]);
            }
        }
        float sums[16];
        __builtin_memcpy(sums, tiles.bytes[c][m], sizeof sums);
        for (int64_t n = 0; n < 16; ++n)
            sums[n] += even[n] + odd[n];
        __builtin_memcpy(tiles.bytes[c][m], sums, sizeof sums);
    }
}

} // namespace

#include "simd/tile_gemm.inl"

#include "simd/attention_tiles.inl"

#include "simd/tile_table.inl"

const pi_kernels pi_kernels_amx_emulated =
    with_tiles(make_avx512_table("amx_emulated", pi_cpu_has_avx512_bf16));
