// sums.cu: the sums of the rows of neurons that fire, and the record of those.
#include "operations.h"
#include "rows.cuh"

#include <algorithm>

namespace pi_cuda {
namespace {

constexpr uint32_t sum_warps = 16;
constexpr uint32_t listed = 128; // rows of a warp that are looked at together

// Columns of a block; a row of them takes some lanes of a warp, so that a warp reads a few rows at once.
template <int type>
constexpr uint32_t sum_columns = std::min<uint32_t>(256, warp_size *Type<type>::width);
template <int type>
constexpr uint32_t row_lanes = sum_columns<type> / Type<type>::width;

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

struct FiringRow {
    uint32_t row;
    float coef;
};

// Of the part's rows [begin, begin + 16 * 128) those of the warp whose coefficient is not 0, in order; how
// many.
__device__ __forceinline__ uint32_t list_rows(const RowSum &work, uint32_t begin, FiringRow *list) {
    const uint32_t lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    uint32_t row[listed / warp_size], n = 0;
    float coef[listed / warp_size];
#pragma unroll
    for (uint32_t i = 0; i < listed / warp_size; ++i) {
        row[i] = ((begin + (i * warp_size + lane) * sum_warps + warp) * gridDim.y) + blockIdx.y;
        coef[i] = row[i] < work.rows.n_rows ? __ldcg(work.coef + row[i]) : 0.0f;
    }
#pragma unroll
    for (uint32_t i = 0; i < listed / warp_size; ++i) {
        const uint32_t firing = __ballot_sync(0xffffffffu, coef[i] != 0);
        if (coef[i] != 0)
            list[n + static_cast<uint32_t>(__popc(firing & ((1u << lane) - 1)))] = {row[i], coef[i]};
        n += static_cast<uint32_t>(__popc(firing));
    }
    __syncwarp();
    return n;
}

// sum += the listed rows' values of the lane's slice: lanes of the same slice take the rows in turns.
template <int type>
__device__ __forceinline__ void add_rows(const pi_gpu_rows &rows, const FiringRow *list, uint32_t n,
                                         uint32_t slice, float *sum) {
    constexpr uint32_t at_once = warp_size / row_lanes<type>, depth = slices_ahead<type>;
    typename Type<type>::Packed packed[depth];
    if (n == 0)
        return;
    // The last row in place of those beyond it. Without a branch, so that each load is waited for alone.
    const auto load = [&](uint32_t d, uint32_t at) {
        const uint64_t offset = rows.row_stride * list[min(at, n - 1)].row;
        packed[d] = Type<type>::load(
            {static_cast<const uint8_t *>(rows.data) + offset, rows.n_cols / layouts[type].block_elements},
            slice);
    };
    const uint32_t first = threadIdx.x % warp_size / row_lanes<type>;
#pragma unroll
    for (uint32_t d = 0; d < depth; ++d)
        load(d, first + d * at_once);
    for (uint32_t begin = 0; begin < n; begin += depth * at_once) {
#pragma unroll
        for (uint32_t d = 0; d < depth; ++d) {
            const uint32_t at = begin + first + d * at_once;
            add_values<type>(packed[d], at < n ? list[at].coef : 0.0f, sum);
            load(d, at + depth * at_once);
        }
    }
}

// Block (c, s): columns [c * sum_columns, ...) of rows s, s + gridDim.y and so on, of which its warps take
// one after the other. The last block of the columns adds the parts in order.
template <int type>
__global__ void __launch_bounds__(sum_warps *warp_size, 1)
    row_sum_kernel(const __grid_constant__ RowSum work) {
    constexpr uint32_t width = Type<type>::width, columns = sum_columns<type>, own = columns / warp_size;
    __shared__ union {
        FiringRow list[sum_warps][listed];
        float sums[sum_warps][columns];
    } shared;
    const uint32_t warp = threadIdx.x / warp_size, n_cols = work.rows.n_cols;
    const uint32_t first = blockIdx.x * columns;
    const uint32_t slice = first / width + threadIdx.x % row_lanes<type>;
    float sum[width] = {};
    let_next_begin();
    wait_for_previous();
    for (uint32_t begin = 0; begin * gridDim.y < work.rows.n_rows; begin += sum_warps * listed) {
        const uint32_t n = list_rows(work, begin, shared.list[warp]);
        add_rows<type>(work.rows, shared.list[warp], n, min(slice, n_cols / width - 1), sum);
        __syncwarp();
    }
    uint32_t column = threadIdx.x % row_lanes<type> * width; // of the block's
    merge_lanes<width / 2, warp_size / 2, row_lanes<type>>(sum, column);
    __syncthreads(); // lists are no longer needed
#pragma unroll
    for (uint32_t j = 0; j < own; ++j)
        shared.sums[warp][column + j] = sum[j];
    __syncthreads();
    const uint32_t i = first + threadIdx.x;
    const bool mine = threadIdx.x < columns && i < n_cols;
    float total = 0;
    if (mine) {
#pragma unroll
        for (uint32_t w = 0; w < sum_warps; ++w)
            total += shared.sums[w][threadIdx.x];
    }
    if (gridDim.y > 1) {
        if (mine)
            work.partials[uint64_t{n_cols} * blockIdx.y + i] = total;
        if (!is_last_block(work.n_done + blockIdx.x, gridDim.y))
            return;
        if (mine)
            total = sum_of_parts(work.partials + i, gridDim.y, n_cols, [](uint32_t) { return 1.0f; });
    }
    if (mine)
        work.out[i] = work.add ? __ldcg(work.out + i) + total : total;
}

template <int type>
void start_sums(pi_gpu &gpu, RowSum work) {
    const uint32_t chunks = ceil_div(work.rows.n_cols, sum_columns<type>);
    // A block a processor; the number must not depend on how many neurons fire.
    const uint32_t parts = std::max(1u, std::min(static_cast<uint32_t>(gpu.n_processors) / chunks,
                                                 ceil_div(work.rows.n_rows, 4 * sum_warps)));
    if (parts > 1) {
        work.partials = scratch_of<float>(gpu, gpu.partials, uint64_t{parts} * work.rows.n_cols);
        work.n_done = counters(gpu, chunks);
    }
    launch_early("summing rows", gpu, row_sum_kernel<type>, dim3(chunks, parts), sum_warps * warp_size, 0,
                 work);
}

} // namespace

void accumulate_rows(pi_gpu &gpu, const pi_gpu_rows &rows, const float *coef, bool add, float *out) {
    RowSum work{};
    work.rows = rows;
    work.coef = coef;
    work.out = out;
    work.add = add;
    for_type(rows.kernel_type, [&]<int type>() { start_sums<type>(gpu, work); });
}

int32_t record(pi_gpu *gpu, const float *activations, uint32_t n, uint64_t *words) {
    return operate(gpu, [&](pi_gpu &device) {
        launch("recording neurons", device, record_kernel, ceil_div(n, 256), 256, 0, activations, n,
               reinterpret_cast<unsigned long long *>(words));
    });
}

} // namespace pi_cuda
