// attention_tiles.cu: attention of up to 64 neighbouring tokens of one sequence a block, on the matrix units
// with an online softmax: 16 tokens a warp, one page of 32 positions at a time.
#include "attention.cuh"
#include "mma.cuh"

#include <algorithm>

namespace pi_cuda {
namespace {

constexpr int tile_tokens = 64;
constexpr int n_threads = 128;
constexpr int key_stride = page + 8; // halves
constexpr float log2_e = 1.4426950408889634f;
constexpr uint32_t least_tokens = 8; // a smaller step is faster token by token

// The warp's 16 tokens: rows g and g + 8 of the fragments.
template <int head_dim>
struct TileState {
    float out[head_dim / 8][4];
    float peak[2];
    float sum[2]; // this thread's part
};

// q [tile_tokens, head_dim + 8], scaled for a softmax of base 2; zeros beyond the tile's tokens.
template <int head_dim>
__device__ __forceinline__ void load_queries(const pi_gpu_attention &work, uint32_t begin, uint32_t n,
                                             __half *q) {
    const float scale = log2_e / sqrtf(static_cast<float>(head_dim));
    for (uint32_t at = threadIdx.x; at < tile_tokens * head_dim; at += n_threads) {
        const uint32_t t = at / head_dim, d = at % head_dim;
        const float x =
            t < n ? work.q[(uint64_t{begin + t} * work.n_heads + blockIdx.x) * head_dim + d] : 0.0f;
        q[t * (head_dim + 8) + d] = __float2half_rn(x * scale);
    }
}

// k [head_dim, key_stride] and v [page, head_dim + 8] of one page.
template <int head_dim>
__device__ __forceinline__ void load_page(const uint8_t *from, __half *k, __half *v) {
    const auto *piece = reinterpret_cast<const uint4 *>(from);
    constexpr int pieces = head_dim * page / 8, per_value = head_dim / 8;
    for (int at = threadIdx.x; at < pieces; at += n_threads) {
        *reinterpret_cast<uint4 *>(k + at / 4 * key_stride + at % 4 * 8) = piece[at];
        *reinterpret_cast<uint4 *>(v + at / per_value * (head_dim + 8) + at % per_value * 8) =
            piece[pieces + at];
    }
}

// score [4][4]: 16 tokens x 32 positions as four fragments of 8 positions.
template <int head_dim>
__device__ __forceinline__ void multiply_keys(const __half *q, const __half *k, float (&score)[4][4]) {
#pragma unroll
    for (int d = 0; d < head_dim; d += 16) {
        uint32_t a[4], b[2][4];
        load_matrices(a_tile(q + d, head_dim + 8), a);
#pragma unroll
        for (int j = 0; j < 2; ++j)
            load_transposed(b_tile_transposed(k + d * key_stride + 16 * j, key_stride), b[j]);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            multiply_add(score[j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}

// Scores become weights; the state's sums follow the new peaks.
template <int head_dim>
__device__ __forceinline__ void soften(float (&score)[4][4], TileState<head_dim> &state) {
#pragma unroll
    for (int half = 0; half < 2; ++half) { // rows g, g + 8
        float peak = state.peak[half];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            peak = fmaxf(peak, fmaxf(score[j][2 * half], score[j][2 * half + 1]));
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
        const float base =
            peak == -INFINITY ? 0.0f : peak; // nothing visible yet: every weight is exp2(-inf) = 0
        const float rescale = exp2f(state.peak[half] - base);
        state.peak[half] = peak;
        state.sum[half] *= rescale;
#pragma unroll
        for (int i = 0; i < head_dim / 8; ++i) {
            state.out[i][2 * half] *= rescale;
            state.out[i][2 * half + 1] *= rescale;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
                score[j][e] = exp2f(score[j][e] - base);
                state.sum[half] += score[j][e];
            }
        }
    }
}

template <int head_dim>
__device__ __forceinline__ void multiply_values(const float (&weight)[4][4], const __half *v,
                                                TileState<head_dim> &state) {
#pragma unroll
    for (int p = 0; p < 2; ++p) { // 16 positions
        const uint32_t a[4] = {pack_halves(weight[2 * p][0], weight[2 * p][1]),
                               pack_halves(weight[2 * p][2], weight[2 * p][3]),
                               pack_halves(weight[2 * p + 1][0], weight[2 * p + 1][1]),
                               pack_halves(weight[2 * p + 1][2], weight[2 * p + 1][3])};
#pragma unroll
        for (int d = 0; d < head_dim; d += 16) {
            uint32_t b[4];
            load_transposed(b_tile_transposed(v + 16 * p * (head_dim + 8) + d, head_dim + 8), b);
            multiply_add(state.out[d / 8], a, b[0], b[1]);
            multiply_add(state.out[d / 8 + 1], a, b[2], b[3]);
        }
    }
}

// First and last position that a row's token sees; an empty range beyond the tile.
struct Range {
    uint32_t begin, last;
    bool any;
};

__device__ __forceinline__ void mask(const Range (&range)[2], uint32_t position, float (&score)[4][4]) {
    const uint32_t lane = threadIdx.x % warp_size;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const uint32_t at = position + 8 * j + lane % 4 * 2 + e % 2;
            const Range &of = range[e / 2];
            if (!of.any || at < of.begin || at > of.last)
                score[j][e] = -INFINITY;
        }
    }
}

template <int head_dim>
__device__ __forceinline__ void write_rows(const pi_gpu_attention &work, uint32_t begin, uint32_t n,
                                           const TileState<head_dim> &state) {
    const uint32_t lane = threadIdx.x % warp_size, row = threadIdx.x / warp_size * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float sum = state.sum[half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const uint32_t t = row + 8 * half;
        if (t >= n)
            continue;
        const uint64_t at = uint64_t{begin + t} * work.n_heads + blockIdx.x;
        const float inverse = 1.0f / sum;
#pragma unroll
        for (int i = 0; i < head_dim / 8; ++i) {
            float *to = work.out + at * head_dim + 8 * i + lane % 4 * 2;
            *reinterpret_cast<float2 *>(to) = {state.out[i][2 * half] * inverse,
                                               state.out[i][2 * half + 1] * inverse};
        }
        if (lane % 4 == 0 && work.lse != nullptr)
            work.lse[at] = state.peak[half] / log2_e + logf(sum);
    }
}

// Block (query head, tile). tiles [n, 2]: first token and one beyond the last.
template <int head_dim>
__global__ void __launch_bounds__(n_threads)
    tile_kernel(const __grid_constant__ pi_gpu_attention work, const uint32_t *tiles) {
    __shared__ uint4 q_memory[tile_tokens * (head_dim + 8) / 8];
    __shared__ uint4 k_memory[head_dim * key_stride / 8];
    __shared__ uint4 v_memory[page * (head_dim + 8) / 8];
    auto *q = reinterpret_cast<__half *>(q_memory), *k = reinterpret_cast<__half *>(k_memory);
    auto *v = reinterpret_cast<__half *>(v_memory);
    const uint32_t begin = tiles[2 * blockIdx.y], n = tiles[2 * blockIdx.y + 1] - begin;
    const pi_gpu_step &step = work.step;
    const uint32_t lane = threadIdx.x % warp_size, warp_row = threadIdx.x / warp_size * 16;
    load_queries<head_dim>(work, begin, n, q);
    Range range[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint32_t t = warp_row + lane / 4 + 8 * half, token = begin + min(t, n - 1);
        range[half] = {step.oldest[token], step.slot[token], t < n};
    }
    const uint32_t *table = step.table + uint64_t{step.table_stride} * step.sequence[begin];
    const uint32_t of_kv = blockIdx.x / (work.n_heads / work.kv.n_kv_heads);
    TileState<head_dim> state = {{}, {-INFINITY, -INFINITY}, {}};
    // Slots ascend within a tile, and so do the oldest positions.
    const uint32_t first = step.oldest[begin] / page, end = step.slot[begin + n - 1] / page + 1;
    for (uint32_t i = first; i < end; ++i) {
        __syncthreads();
        load_page<head_dim>(kv_head(work.kv, table[i], of_kv), k, v);
        __syncthreads();
        float score[4][4] = {};
        multiply_keys<head_dim>(q + warp_row * (head_dim + 8), k, score);
        mask(range, i * page, score);
        soften(score, state);
        multiply_values(score, v, state);
    }
    write_rows(work, begin, n, state);
}

template <int head_dim>
void start_tiles(pi_gpu &gpu, const pi_gpu_attention &work, const uint32_t *tiles) {
    launch("attention of tiles", gpu, tile_kernel<head_dim>, dim3(work.n_heads, work.n_tiles), n_threads, 0,
           work, tiles);
}

} // namespace

bool attend_tiles(pi_gpu &gpu, const pi_gpu_attention &work) {
    if (work.tiles == nullptr || work.step.tree != nullptr || work.kv.half_precision == 0 ||
        work.step.n_tokens < least_tokens)
        return false;
    switch (work.kv.head_dim) {
    case 32:
        start_tiles<32>(gpu, work, work.tiles);
        return true;
    case 64:
        start_tiles<64>(gpu, work, work.tiles);
        return true;
    case 80:
        start_tiles<80>(gpu, work, work.tiles);
        return true;
    case 96:
        start_tiles<96>(gpu, work, work.tiles);
        return true;
    case 128:
        start_tiles<128>(gpu, work, work.tiles);
        return true;
    default:
        return false;
    }
}

} // namespace pi_cuda
