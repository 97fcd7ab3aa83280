// tile_gemm.inl: products of many tokens on a unit that multiplies tiles of 16 x 32 with 32 x 16 bfloat16 and
// adds up in float (Intel AMX). The including file defines the tile operations:
//   tiles_begin(), tiles_end()   for a thread: eight tiles of 16 rows of 64 bytes
//   tile_zero<t>(), tile_load<t>(p, stride), tile_store<t>(p, stride)   stride in bytes
//   tile_multiply<c, a, b>()     c[m][n] += sum over k of a[m][2 k] * b[k][2 n] + a[m][2 k + 1] * b[k][2 n +
//   1]

#pragma once

#include "bf16_pairs.inl"

namespace {

constexpr int64_t tile_side = 16;
constexpr int64_t tile_depth = 32; // bfloat16 of a row
constexpr int64_t tile_elements = tile_side * tile_depth;
constexpr int64_t block_side = 2 * tile_side; // four tiles of sums, two of either factor
static_assert(gemm_panel == block_side);
constexpr int64_t tile_bytes = 64; // of a row

inline int64_t tile_steps(int64_t n_k) {
    return (n_k + tile_depth - 1) / tile_depth;
}

// x [n_k, gemm_panel] as tiles [panel / 16][k / 32][16 pairs][16 tokens]
void round_panel(const float *x, int64_t n_k, pi_bf16 *out) {
    const int64_t n_steps = tile_steps(n_k);
    for (int64_t pair = 0; pair < n_steps * tile_side; ++pair) {
        const int64_t k = 2 * pair;
        const float *at = x + k * gemm_panel;
        for (int64_t t = 0; t < gemm_panel; t += tile_side) {
            const vfloat first = k < n_k ? vload(at + t) : vzero();
            const vfloat second = k + 1 < n_k ? vload(at + gemm_panel + t) : vzero();
            pi_bf16 *tile = out + (t / tile_side * n_steps + pair / tile_side) * tile_elements;
            _mm512_storeu_si512(tile + pair % tile_side * tile_depth, bf16_pairs(first, second));
        }
    }
}

// Sixteen of a row's elements from k on; zeros beyond n_k.
inline vfloat weights_of_row(const float *row, int64_t k, int64_t n_k, int64_t k_stride) {
    if (k >= n_k)
        return vzero();
    const int64_t n = n_k - k < lanes ? n_k - k : lanes;
    if (k_stride == 1)
        return vload_part(row + k, n);
    float values[lanes] = {};
    for (int64_t i = 0; i < n; ++i)
        values[i] = row[(k + i) * k_stride];
    return vload(values);
}

// w[r * row_stride + k * k_stride] as tiles [rows / 16][k / 32][16 rows][32]; rows up to a multiple of 32
void round_weights(const float *w, int64_t row_stride, int64_t k_stride, int64_t n_rows, int64_t n_k,
                   pi_bf16 *out) {
    const int64_t n_steps = tile_steps(n_k);
    for (int64_t r = 0; r < (n_rows + block_side - 1) / block_side * block_side; ++r) {
        pi_bf16 *tile = out + r / tile_side * n_steps * tile_elements + r % tile_side * tile_depth;
        for (int64_t k = 0; k < n_steps * tile_depth; k += tile_depth, tile += tile_elements) {
            vfloat values[2] = {vzero(), vzero()};
            for (int64_t i = 0; i < 2 && r < n_rows; ++i)
                values[i] = weights_of_row(w + r * row_stride, k + i * lanes, n_k, k_stride);
            _mm512_storeu_si512(tile, bf16_neighbours(values[0], values[1]));
        }
    }
}

// sums [32, stride] += 32 rows of weights times 32 tokens
inline void multiply_block(const pi_bf16 *w, const pi_bf16 *x, int64_t n_steps, float *sums, int64_t stride) {
    const int64_t sum_bytes = stride * static_cast<int64_t>(sizeof(float));
    float *lower = sums + tile_side * stride;
    tile_load<0>(sums, sum_bytes);
    tile_load<1>(sums + tile_side, sum_bytes);
    tile_load<2>(lower, sum_bytes);
    tile_load<3>(lower + tile_side, sum_bytes);
    for (int64_t step = 0; step < n_steps; ++step, w += tile_elements, x += tile_elements) {
        tile_load<4>(w, tile_bytes);
        tile_load<5>(w + n_steps * tile_elements, tile_bytes);
        tile_load<6>(x, tile_bytes);
        tile_load<7>(x + n_steps * tile_elements, tile_bytes);
        tile_multiply<0, 4, 6>();
        tile_multiply<1, 4, 7>();
        tile_multiply<2, 5, 6>();
        tile_multiply<3, 5, 7>();
    }
    tile_store<0>(sums, sum_bytes);
    tile_store<1>(sums + tile_side, sum_bytes);
    tile_store<2>(lower, sum_bytes);
    tile_store<3>(lower + tile_side, sum_bytes);
}

// Rows [0, n_rows) of a block that has fewer than 32.
inline void multiply_part(const pi_bf16 *w, const pi_bf16 *x, int64_t n_steps, int64_t n_rows, float *out,
                          int64_t out_stride) {
    alignas(64) float sums[block_side][block_side] = {};
    for (int64_t r = 0; r < n_rows; ++r)
        __builtin_memcpy(sums[r], out + r * out_stride, sizeof sums[r]);
    multiply_block(w, x, n_steps, sums[0], block_side);
    for (int64_t r = 0; r < n_rows; ++r)
        __builtin_memcpy(out + r * out_stride, sums[r], sizeof sums[r]);
}

void gemm_rounded(const pi_bf16 *w, int64_t n_rows, const pi_bf16 *x, int64_t n_k, float *out,
                  int64_t out_stride) {
    const int64_t n_steps = tile_steps(n_k), block_elements = 2 * n_steps * tile_elements;
    tiles_begin();
    for (int64_t r = 0; r < n_rows; r += block_side, w += block_elements, out += block_side * out_stride) {
        if (n_rows - r < block_side) {
            multiply_part(w, x, n_steps, n_rows - r, out, out_stride);
        } else {
            multiply_block(w, x, n_steps, out, out_stride);
        }
    }
    tiles_end();
}

} // namespace
