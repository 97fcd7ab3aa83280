// gemm.cu: large products on the matrix units, float16 with float32 sums: 128 tokens x 128 outputs a block,
// 64 x 32 a warp, two stages of 32 in shared memory.
#include "cublaslt.h"
#include "mma.cuh"
#include "rows.cuh"

namespace pi_cuda {
namespace {

constexpr int tile = 128; // tokens, outputs
constexpr int depth = 32; // of a stage
constexpr int n_threads = 256;
constexpr int row_stride = depth + 8;           // halves: rows of eight fall into different banks
constexpr int column_stride = tile + 8;         // of a stage of w [k, n]
constexpr int stage_halves = tile * row_stride; // more than depth * column_stride
constexpr float largest_half = 32768.0f;

// A block a token: the largest magnitude decides the scale.
__global__ void to_halves_kernel(const float *x, uint32_t n, uint32_t n_k, __half *out, float *scale) {
    __shared__ float shared[warp_size];
    const float *row = x + uint64_t{n} * blockIdx.x;
    float largest = 0;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        largest = fmaxf(largest, fabsf(row[i]));
    largest = block_max(largest, shared);
    int exponent = 0;
    if (largest > largest_half && largest < INFINITY)
        exponent = ilogbf(largest) - 14;
    const float down = ldexpf(1.0f, -exponent);
    for (uint32_t i = threadIdx.x; i < n_k; i += blockDim.x)
        out[uint64_t{n_k} * blockIdx.x + i] = __float2half_rn(i < n ? row[i] * down : 0.0f);
    if (threadIdx.x == 0)
        scale[blockIdx.x] = ldexpf(1.0f, exponent);
}

// Two 16-byte pieces a thread of a stage's tile, whose rows have `per_row` pieces: x and w [rows, k] 4, w [k,
// n] 16.
struct Pieces {
    uint4 piece[2];
};

constexpr int along_inputs = depth / 8;
constexpr int along_outputs = tile / 8;

// The tile at (row, column) of a matrix [n_rows, n_columns], zeros outside.
template <int per_row>
__device__ __forceinline__ Pieces load_pieces(const __half *from, uint32_t stride, uint32_t first_row,
                                              uint32_t n_rows, uint32_t first_column, uint32_t n_columns) {
    Pieces pieces;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t at = threadIdx.x + i * n_threads;
        const uint32_t row = first_row + at / per_row, column = first_column + at % per_row * 8;
        pieces.piece[i] = row < n_rows && column < n_columns
                              ? *reinterpret_cast<const uint4 *>(from + uint64_t{stride} * row + column)
                              : uint4{0, 0, 0, 0};
    }
    return pieces;
}

template <int per_row>
__device__ __forceinline__ void store_pieces(const Pieces &pieces, __half *stage, uint32_t stage_stride) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t at = threadIdx.x + i * n_threads;
        *reinterpret_cast<uint4 *>(stage + at / per_row * stage_stride + at % per_row * 8) = pieces.piece[i];
    }
}

// The warp's 64 x 32 of one stage.
template <bool transposed>
__device__ __forceinline__ void multiply_stage(const __half *x, const __half *w, int warp_token, int warp_out,
                                               float (&sum)[4][4][4]) {
#pragma unroll
    for (int k = 0; k < depth; k += 16) {
        uint32_t a[4][4], b[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            load_matrices(a_tile(x + (warp_token + 16 * i) * row_stride + k, row_stride), a[i]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int out = warp_out + 16 * j;
            if (transposed) {
                load_transposed(b_tile_transposed(w + k * column_stride + out, column_stride), b[j]);
            } else {
                load_matrices(b_tile(w + out * row_stride + k, row_stride), b[j]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                multiply_add(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
}

__device__ __forceinline__ void write_tile(const Gemm &work, uint32_t token, uint32_t out,
                                           const float (&sum)[4][4][4]) {
    const uint32_t lane = threadIdx.x % warp_size;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const uint32_t t = token + 16 * i + lane / 4 + e / 2 * 8;
            if (t >= work.x.n_tokens)
                continue;
            const float scale = work.x.scale[t];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t column = out + 8 * j + lane % 4 * 2 + e % 2;
                if (column >= work.n_out)
                    continue;
                float *to = work.out + uint64_t{work.out_stride} * t + column;
                float value = sum[i][j][e] * scale;
                if (work.bias != nullptr)
                    value += work.bias[column];
                value = work.accumulate ? *to + value : value;
                *to = work.relu ? fmaxf(value, 0.0f) : value;
            }
        }
    }
}

template <bool transposed>
__global__ void __launch_bounds__(n_threads) gemm_kernel(const __grid_constant__ Gemm work) {
    __shared__ uint4 memory[2][2][stage_halves / 8];
    const uint32_t first_token = blockIdx.y * tile, first_out = blockIdx.x * tile;
    const int warp = threadIdx.x / warp_size, warp_token = warp / 4 * 64, warp_out = warp % 4 * 32;
    const __half *x = work.x.data + work.k_begin;
    const auto load_w = [&](uint32_t k) {
        if constexpr (transposed)
            return load_pieces<along_outputs>(work.w, work.w_stride, k, work.n_k, first_out, work.n_out);
        else
            return load_pieces<along_inputs>(work.w, work.w_stride, first_out, work.n_out, k, work.n_k);
    };
    const auto load_x = [&](uint32_t k) {
        return load_pieces<along_inputs>(x, work.x.n_k, first_token, work.x.n_tokens, k, work.n_k);
    };
    const auto store = [&](const Pieces &px, const Pieces &pw, int stage) {
        store_pieces<along_inputs>(px, reinterpret_cast<__half *>(memory[stage][0]), row_stride);
        auto *to = reinterpret_cast<__half *>(memory[stage][1]);
        if constexpr (transposed)
            store_pieces<along_outputs>(pw, to, column_stride);
        else
            store_pieces<along_inputs>(pw, to, row_stride);
    };
    float sum[4][4][4] = {};
    store(load_x(0), load_w(0), 0);
    __syncthreads();
    int stage = 0;
    for (uint32_t k = 0; k < work.n_k; k += depth, stage ^= 1) {
        const bool more = k + depth < work.n_k;
        Pieces px, pw;
        if (more) {
            px = load_x(k + depth);
            pw = load_w(k + depth);
        }
        multiply_stage<transposed>(reinterpret_cast<const __half *>(memory[stage][0]),
                                   reinterpret_cast<const __half *>(memory[stage][1]), warp_token, warp_out,
                                   sum);
        if (more)
            store(px, pw, stage ^ 1);
        __syncthreads();
    }
    write_tile(work, first_token + warp_token, first_out + warp_out, sum);
}

} // namespace

Halves to_halves(pi_gpu &gpu, const float *x, uint32_t n_tokens, uint32_t n) {
    const uint32_t n_k = ceil_div(n, 32) * 32;
    const uint64_t half_bytes = uint64_t{n_tokens} * n_k * sizeof(__half);
    auto *memory = scratch_of<uint8_t>(gpu, gpu.halves, half_bytes + n_tokens * sizeof(float));
    auto *data = reinterpret_cast<__half *>(memory);
    auto *scale = reinterpret_cast<float *>(memory + half_bytes); // n_k is a multiple of 32
    launch("rounding activations", gpu, to_halves_kernel, n_tokens, 256, 0, x, n, n_k, data, scale);
    return {data, scale, n_tokens, n_k};
}

void run_gemm(pi_gpu &gpu, const Gemm &work) {
    if (gpu.cublaslt != nullptr && gpu.cublaslt->run(gpu, work))
        return;
    const dim3 grid(ceil_div(work.n_out, tile), ceil_div(work.x.n_tokens, tile));
    launch("a matrix product", gpu, work.transposed ? gemm_kernel<true> : gemm_kernel<false>, grid, n_threads,
           0, work);
}

} // namespace pi_cuda
