// lists.cu: neurons that fire, as lists on the device: made in ascending order, recorded, and the sums of
// their rows.
#include "operations.h"
#include "rows.cuh"

#include <algorithm>

namespace pi_cuda {
namespace {

constexpr int compact_threads = 1024;
constexpr int sum_warps = 8;
constexpr uint32_t sum_columns = 1024; // of a block: 32 a lane
constexpr uint32_t lane_columns = sum_columns / warp_size;

struct Compaction {
    const float *x;
    uint32_t n;
    const int32_t *from_index; // or null
    const uint32_t *from_length;
    float threshold;
    uint32_t inclusive;
    int32_t *index;
    float *value; // or null
    uint32_t *length;
    unsigned long long *total; // or null
};

__device__ __forceinline__ bool passes(const Compaction &work, float x) {
    return x > work.threshold || (work.inclusive != 0 && x == work.threshold);
}

// One block; a thread takes a run of neighbours, so that the list ascends.
__global__ void __launch_bounds__(compact_threads) compact_kernel(Compaction work) {
    __shared__ uint32_t warp_totals[compact_threads / warp_size];
    const uint32_t n = work.from_length == nullptr ? work.n : *work.from_length;
    const uint32_t each = (n + blockDim.x - 1) / blockDim.x;
    const uint32_t begin = min(threadIdx.x * each, n), end = min(begin + each, n);
    uint32_t mine = 0;
    for (uint32_t i = begin; i < end; ++i)
        mine += passes(work, work.x[i]) ? 1 : 0;
    uint32_t total = 0;
    uint32_t at = exclusive_sum(mine, warp_totals, &total);
    for (uint32_t i = begin; i < end; ++i) {
        const float x = work.x[i];
        if (!passes(work, x))
            continue;
        work.index[at] = work.from_index == nullptr ? static_cast<int32_t>(i) : work.from_index[i];
        if (work.value != nullptr)
            work.value[at] = x;
        ++at;
    }
    if (threadIdx.x == 0) {
        *work.length = total;
        if (work.total != nullptr)
            *work.total += total;
    }
}

__global__ void record_kernel(const int32_t *index, const uint32_t *length, uint32_t n, const float *coef,
                              unsigned long long *words) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (length == nullptr ? n : *length) || coef[i] == 0)
        return;
    const uint32_t neuron = index == nullptr ? i : static_cast<uint32_t>(index[i]);
    atomicOr(words + neuron / 64, 1ull << (neuron % 64));
}

struct RowSum {
    pi_gpu_rows rows;
    const int32_t *index;   // or null: all rows
    const uint32_t *length; // of the index
    const float *coef;
    float *partials; // [gridDim.y, n_cols]
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

// Block (c, s): columns [1024 c, ...) of every gridDim.y-th group of 8 rows, a row a warp.
template <int type>
__global__ void __launch_bounds__(sum_warps *warp_size) row_sum_kernel(const __grid_constant__ RowSum work) {
    constexpr uint32_t width = Type<type>::width, block_elements = layouts[type].block_elements;
    constexpr uint32_t pieces = lane_columns / width;
    __shared__ float shared[sum_columns];
    const uint32_t lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    const uint32_t n = work.index == nullptr ? work.rows.n_rows : *work.length;
    const uint32_t n_slices = work.rows.n_cols / width, first = blockIdx.x * (sum_columns / width);
    float sum[lane_columns] = {};
    float values[width];
    for (uint32_t i = blockIdx.y * sum_warps + warp; i < n; i += gridDim.y * sum_warps) {
        const float coef = work.coef[i];
        if (coef == 0)
            continue;
        const uint32_t r = work.index == nullptr ? i : static_cast<uint32_t>(work.index[i]);
        const RowView row = {static_cast<const uint8_t *>(work.rows.data) + work.rows.row_stride * r,
                             work.rows.n_cols / block_elements};
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
    add_warps(sum, shared);
    float *out = work.partials + uint64_t{work.rows.n_cols} * blockIdx.y;
    for (uint32_t piece = warp; piece < pieces; piece += sum_warps) {
        const uint32_t slice = first + piece * warp_size + lane;
        for (uint32_t j = 0; j < width && slice < n_slices; ++j)
            out[slice * width + j] = shared[(piece * width + j) * warp_size + lane];
    }
}

__global__ void add_partials_kernel(const float *partials, uint32_t n_parts, uint32_t n, float *out) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    float sum = 0;
    for (uint32_t part = 0; part < n_parts; ++part)
        sum += partials[uint64_t{n} * part + i];
    out[i] = sum;
}

} // namespace

void accumulate_rows(pi_gpu &gpu, const pi_gpu_rows &rows, const pi_gpu_list *list, const float *coef,
                     float *out) {
    const uint32_t chunks = ceil_div(rows.n_cols, sum_columns);
    // About two blocks a processor; the number must not depend on how many neurons fire.
    const uint32_t parts =
        std::max(1u, std::min(ceil_div(2u * static_cast<uint32_t>(gpu.n_processors), chunks),
                              ceil_div(rows.n_rows, 4 * sum_warps)));
    RowSum work{};
    work.rows = rows;
    work.index = list == nullptr ? nullptr : list->index;
    work.length = list == nullptr ? nullptr : list->length;
    work.coef = coef;
    work.partials = parts == 1 ? out : scratch_of<float>(gpu, gpu.partials, uint64_t{parts} * rows.n_cols);
    for_type(rows.kernel_type, [&]<int type>() {
        launch("summing rows", gpu, row_sum_kernel<type>, dim3(chunks, parts), sum_warps * warp_size, 0,
               work);
    });
    if (parts > 1)
        launch("adding partial sums", gpu, add_partials_kernel, ceil_div(rows.n_cols, 256), 256, 0,
               work.partials, parts, rows.n_cols, out);
}

int32_t compact(pi_gpu *gpu, const float *x, uint32_t n, const pi_gpu_list *from, float threshold,
                uint32_t inclusive, const pi_gpu_list *list, uint64_t *total) {
    return operate(gpu, [&](pi_gpu &device) {
        const Compaction work = {x,
                                 n,
                                 from == nullptr ? nullptr : from->index,
                                 from == nullptr ? nullptr : from->length,
                                 threshold,
                                 inclusive,
                                 list->index,
                                 list->value,
                                 list->length,
                                 reinterpret_cast<unsigned long long *>(total)};
        launch("making a list of neurons", device, compact_kernel, 1, compact_threads, 0, work);
    });
}

int32_t record(pi_gpu *gpu, const pi_gpu_list *list, uint32_t n, const float *coef, uint64_t *words) {
    return operate(gpu, [&](pi_gpu &device) {
        launch("recording neurons", device, record_kernel, ceil_div(n, 256), 256, 0,
               list == nullptr ? nullptr : list->index, list == nullptr ? nullptr : list->length, n, coef,
               reinterpret_cast<unsigned long long *>(words));
    });
}

} // namespace pi_cuda
