// gemm.cu: large products on the matrix units, float16 with float32 sums: 128 tokens x 128 outputs a block,
// 64 x 32 a warp, three stages of 32 in shared memory, of which two are on their way while one is used.
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
constexpr int n_stages = 3;
constexpr size_t shared_bytes = sizeof(__half) * 2 * stage_halves * n_stages;
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

constexpr int along_inputs = depth / 8; // pieces of 16 bytes of a row of x, or of w [rows, k]
constexpr int along_outputs = tile / 8; // of w [k, n]

// Starts copies of the tile at (row, column) of a matrix [n_rows, n_columns], zeros outside: two pieces a
// thread.
template <int per_row>
__device__ __forceinline__ void copy_tile(const __half *from, uint32_t stride, uint32_t first_row,
                                          uint32_t n_rows, uint32_t first_column, uint32_t n_columns,
                                          __half *to, uint32_t to_stride) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32_t at = threadIdx.x + i * n_threads;
        const uint32_t row = first_row + at / per_row, column = first_column + at % per_row * 8;
        const bool inside = row < n_rows && column < n_columns;
        copy_async(to + at / per_row * to_stride + at % per_row * 8,
                   inside ? from + uint64_t{stride} * row + column : from, inside);
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
    PI_SHARED(__half, memory); // [n_stages][x, w][stage_halves]
    const uint32_t first_token = blockIdx.y * tile, first_out = blockIdx.x * tile;
    const int warp = threadIdx.x / warp_size, warp_token = warp / 4 * 64, warp_out = warp % 4 * 32;
    const auto start_stage = [&](uint32_t number) {
        const uint32_t k = number * depth;
        __half *x = memory + number % n_stages * 2 * stage_halves, *w = x + stage_halves;
        if (k < work.n_k) {
            copy_tile<along_inputs>(work.x.data + work.k_begin, work.x.n_k, first_token, work.x.n_tokens, k,
                                    work.n_k, x, row_stride);
            if constexpr (transposed)
                copy_tile<along_outputs>(work.w, work.w_stride, k, work.n_k, first_out, work.n_out, w,
                                         column_stride);
            else
                copy_tile<along_inputs>(work.w, work.w_stride, first_out, work.n_out, k, work.n_k, w,
                                        row_stride);
        }
        commit_copies(); // beyond the last an empty group, so that their number tells which are there
    };
    float sum[4][4][4] = {};
    for (uint32_t number = 0; number < n_stages - 1; ++number)
        start_stage(number);
    for (uint32_t number = 0; number * depth < work.n_k; ++number) {
        wait_for_copies<n_stages - 2>();
        __syncthreads(); // the stage is there, of all threads; and all have used the one before
        start_stage(number + n_stages - 1);
        const __half *x = memory + number % n_stages * 2 * stage_halves;
        multiply_stage<transposed>(x, x + stage_halves, warp_token, warp_out, sum);
    }
    wait_for_copies<0>();
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
    const auto kernel = work.transposed ? gemm_kernel<true> : gemm_kernel<false>;
    check(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          "taking shared memory");
    launch("a matrix product", gpu, kernel, grid, n_threads, shared_bytes, work);
}

} // namespace pi_cuda
