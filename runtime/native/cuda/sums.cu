// sums.cu: the sums of the rows of neurons that fire, and the record of those.
#include "operations.h"
#include "rows.cuh"

#include <algorithm>

namespace pi_cuda {
namespace {

constexpr int sum_warps = 8;
constexpr uint32_t sum_columns = 1024; // of a block: 32 a lane
constexpr uint32_t lane_columns = sum_columns / warp_size;

__global__ void record_kernel(const float *activations, uint32_t n, unsigned long long *words) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && activations[i] != 0)
        atomicOr(words + i / 64, 1ull << (i % 64));
}

struct RowSum {
    pi_gpu_rows rows;
    const float *coef;
    float *partials;  // [gridDim.y, n_cols]
    uint32_t *n_done; // [gridDim.x] zero
    float *out;       // [n_cols]
    bool add;         // to what out holds
};

// Adds the warps' sums of 1024 columns through shared memory, one warp after the other.
__device__ void add_warps(const float (&sum)[lane_columns], float *shared) {
    const int warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    for (int w = 0; w < sum_warps; ++w) {
        if (w == warp) {
#pragma unroll
            for (int j = 0; j < static_cast<int>(lane_columns); ++j) {
                float &to = shared[j * warp_size + lane];
                to = w == 0 ? sum[j] : to + sum[j];
            }
        }
        __syncthreads();
    }
}

// Adds coef times a lane's part of a row: piece p is its slice first + 32 p + lane.
template <int type>
__device__ __forceinline__ void add_row(const pi_gpu_rows &rows, uint32_t r, float coef, uint32_t first,
                                        float (&sum)[lane_columns]) {
    constexpr uint32_t width = Type<type>::width, pieces = lane_columns / width;
    const uint32_t lane = threadIdx.x % warp_size, n_slices = rows.n_cols / width;
    const RowView row = {static_cast<const uint8_t *>(rows.data) + rows.row_stride * r,
                         rows.n_cols / layouts[type].block_elements};
    float values[width];
#pragma unroll
    for (uint32_t piece = 0; piece < pieces; ++piece) {
        const uint32_t slice = first + piece * warp_size + lane;
        if (slice >= n_slices)
            continue;
        Type<type>::unpack(Type<type>::load(row, slice), values);
#pragma unroll
        for (uint32_t j = 0; j < width; ++j)
            sum[piece * width + j] += coef * values[j];
    }
}

// The partial sums of a block's columns, by the last of its blocks.
__device__ __forceinline__ void add_partials(const RowSum &work) {
    const uint32_t n_cols = work.rows.n_cols;
    for (uint32_t i = blockIdx.x * sum_columns + threadIdx.x; i < min((blockIdx.x + 1) * sum_columns, n_cols);
         i += blockDim.x) {
        float sum = 0;
#pragma unroll 8
        for (uint32_t part = 0; part < gridDim.y; ++part)
            sum += work.partials[uint64_t{n_cols} * part + i];
        work.out[i] = work.add ? work.out[i] + sum : sum;
    }
}

// Block (c, s): columns [1024 c, ...) of every gridDim.y-th group of 8 rows, a row a warp; a warp looks at
// the coefficients of 32 of its rows at once.
template <int type>
__global__ void __launch_bounds__(sum_warps *warp_size) row_sum_kernel(const __grid_constant__ RowSum work) {
    constexpr uint32_t width = Type<type>::width, pieces = lane_columns / width;
    __shared__ float shared[sum_columns];
    const uint32_t lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    const uint32_t n = work.rows.n_rows;
    const uint32_t n_slices = work.rows.n_cols / width, first = blockIdx.x * (sum_columns / width);
    const uint32_t stride = gridDim.y * sum_warps;
    float sum[lane_columns] = {};
    for (uint32_t begin = blockIdx.y * sum_warps + warp; begin < n; begin += warp_size * stride) {
        const uint32_t mine = begin + lane * stride;
        const float coef = mine < n ? work.coef[mine] : 0.0f;
        for (uint32_t left = __ballot_sync(0xffffffffu, coef != 0); left != 0; left &= left - 1) {
            const int from = __ffs(static_cast<int>(left)) - 1;
            const uint32_t r = begin + static_cast<uint32_t>(from) * stride;
            add_row<type>(work.rows, r, __shfl_sync(0xffffffffu, coef, from), first, sum);
        }
    }
    add_warps(sum, shared);
    const bool alone = gridDim.y == 1;
    float *out = alone ? work.out : work.partials + uint64_t{work.rows.n_cols} * blockIdx.y;
    for (uint32_t piece = warp; piece < pieces; piece += sum_warps) {
        const uint32_t slice = first + piece * warp_size + lane;
        for (uint32_t j = 0; j < width && slice < n_slices; ++j) {
            const float value = shared[(piece * width + j) * warp_size + lane];
            float &to = out[slice * width + j];
            to = alone && work.add ? to + value : value;
        }
    }
    if (!alone && is_last_block(work.n_done + blockIdx.x, gridDim.y))
        add_partials(work);
}

} // namespace

void accumulate_rows(pi_gpu &gpu, const pi_gpu_rows &rows, const float *coef, bool add, float *out) {
    const uint32_t chunks = ceil_div(rows.n_cols, sum_columns);
    // About two blocks a processor; the number must not depend on how many neurons fire.
    const uint32_t parts =
        std::max(1u, std::min(ceil_div(2u * static_cast<uint32_t>(gpu.n_processors), chunks),
                              ceil_div(rows.n_rows, 4 * sum_warps)));
    RowSum work{};
    work.rows = rows;
    work.coef = coef;
    work.out = out;
    work.add = add;
    if (parts > 1) {
        work.partials = scratch_of<float>(gpu, gpu.partials, uint64_t{parts} * rows.n_cols);
        work.n_done = counters(gpu, chunks);
    }
    for_type(rows.kernel_type, [&]<int type>() {
        launch("summing rows", gpu, row_sum_kernel<type>, dim3(chunks, parts), sum_warps * warp_size, 0,
               work);
    });
}

int32_t record(pi_gpu *gpu, const float *activations, uint32_t n, uint64_t *words) {
    return operate(gpu, [&](pi_gpu &device) {
        launch("recording neurons", device, record_kernel, ceil_div(n, 256), 256, 0, activations, n,
               reinterpret_cast<unsigned long long *>(words));
    });
}

} // namespace pi_cuda
