// amx.cpp: AVX-512 with BF16, and prompts on AMX tiles. The tiles' instructions are written out: GCC's
// intrinsics take no template arguments, and do not say that they read and write memory.
#include "cpu.h"
#include "kernels.h"

#include <immintrin.h>
#include <math.h>
#include <stddef.h>

#include "simd/avx512.inl"

namespace {

struct alignas(64) TileConfig {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
};

inline void tiles_begin() {
    TileConfig config{};
    config.palette = 1;
    for (int t = 0; t < 8; ++t) {
        config.row_bytes[t] = 64;
        config.n_rows[t] = 16;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
// Tiles in use make every switch of threads dearer.
inline void tiles_end() {
    __asm__ volatile("tilerelease");
}

template <int t>
inline void tile_load(const void *p, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(t) : "memory");
}
template <int t>
inline void tile_store(void *p, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(t) : "memory");
}
template <int t>
inline void tile_zero() {
    __asm__ volatile("tilezero %%tmm%c0" : : "i"(t));
}
template <int c, int a, int b>
inline void tile_multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

} // namespace

#include "simd/tile_gemm.inl"

#include "simd/attention_tiles.inl"

#include "simd/tile_table.inl"

const pi_kernels pi_kernels_amx = with_tiles(make_avx512_table("amx", pi_cpu_has_amx));
