// gemv.cuh: products of a few vectors with rows of matrices, a pair of rows a warp and turn. Blocks are as
// many as the device holds, so that each stages the vectors once; the first rows are on their way before
// that. Of one vector and so few rows that a turn is enough, a pair has as many warps as there are for it.
#pragma once

#include "neurons.cuh"

namespace pi_cuda {

// One product of a launch.
struct GemvProduct {
    const uint8_t *data;
    uint64_t row_stride;
    uint32_t n_rows;
    uint32_t first_pair; // of the launch
    const float *bias;   // [n_rows] or null
    float *out;          // [n_columns, n_rows]
    uint32_t add;        // to what out holds
    uint32_t relu;       // 0 instead of what is below
};

struct GemvLaunch {
    GemvProduct product[PI_GPU_MAX_PRODUCTS];
    uint32_t n_products;
    uint32_t n_pairs;
    Vectors vectors;
};

__device__ __forceinline__ const GemvProduct &product_of_pair(const GemvLaunch &launch, uint32_t pair) {
    uint32_t i = 0;
    while (i + 1 < launch.n_products && pair >= launch.product[i + 1].first_pair)
        ++i;
    return launch.product[i];
}

// Lane c + columns * r writes row r of the pair for column c.
template <int columns>
__device__ __forceinline__ void write_outputs(const GemvLaunch &launch, uint32_t pair,
                                              const float (*sum)[columns]) {
    const GemvProduct &product = product_of_pair(launch, pair);
    const uint32_t lane = threadIdx.x % warp_size, column = lane % columns;
    const uint32_t row = (pair - product.first_pair) * gemv_rows + lane / columns;
    float value = 0;
#pragma unroll
    for (int i = 0; i < gemv_rows * columns; ++i)
        value = lane == static_cast<uint32_t>(i) ? sum[i / columns][i % columns] : value;
    if (lane >= gemv_rows * columns || row >= product.n_rows || column >= launch.vectors.n_columns)
        return;
    if (product.bias != nullptr)
        value += product.bias[row];
    float *out = product.out + uint64_t{product.n_rows} * column + row;
    value = product.add != 0 ? __ldcg(out) + value : value;
    *out = product.relu != 0 ? fmaxf(value, 0.0f) : value;
}

template <int type>
__device__ __forceinline__ RowPair rows_of_pair(const GemvLaunch &launch, uint32_t pair) {
    const GemvProduct &product = product_of_pair(launch, pair);
    RowPair rows;
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r) { // a row beyond the last is computed, not written
        const uint32_t row = min((pair - product.first_pair) * gemv_rows + r, product.n_rows - 1);
        rows.row[r] = {product.data + product.row_stride * row,
                       launch.vectors.n_cols / layouts[type].block_elements};
    }
    return rows;
}

template <int type, int columns>
__global__ void __launch_bounds__(gemv_threads, 2) gemv_kernel(const __grid_constant__ GemvLaunch launch) {
    PI_SHARED(uint4, shared);
    __shared__ float warp_sums[warp_size];
    const auto rows_of = [&](uint32_t pair) { return rows_of_pair<type>(launch, pair); };
    const Pairs pairs = {blockIdx.x * gemv_warps, gridDim.x * gemv_warps, launch.n_pairs};
    BlockVectors<type, columns> vectors(launch.vectors, shared, warp_sums);
    Ahead<type> ahead;
    begin_pairs<type, columns>(ahead, pairs, launch.vectors.n_cols, rows_of);
    let_next_begin();
    wait_for_previous();
    multiply_pairs<type, columns>(
        ahead, pairs, vectors, rows_of,
        [&](uint32_t pair, const float (*sum)[columns]) { write_outputs<columns>(launch, pair, sum); });
}

// What is added to a lane's output: lane r of the pair's first warp has row r.
__device__ __forceinline__ float value_before(const GemvProduct &product, uint32_t row) {
    const float bias = product.bias == nullptr ? 0.0f : product.bias[row];
    return product.add == 0 ? bias : bias + __ldcg(product.out + row);
}

// One vector, all of it in shared memory at once; `warps` of a block have a pair.
template <int type>
__global__ void __launch_bounds__(gemv_threads, 2)
    one_turn_kernel(const __grid_constant__ GemvLaunch launch, uint32_t warps) {
    PI_SHARED(uint4, shared);
    __shared__ float warp_sums[warp_size], parts[gemv_warps][gemv_rows];
    const uint32_t warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    const uint32_t pair = min((blockIdx.x * gemv_warps + warp) / warps, launch.n_pairs - 1);
    const uint32_t n_slices = launch.vectors.n_cols / Type<type>::width;
    const Group group = {warps * warp_size, threadIdx.x % (warps * warp_size)};
    const RowPair rows = rows_of_pair<type>(launch, pair);
    Ahead<type> ahead;
    begin_group(ahead, group, rows, n_slices);
    let_next_begin();
    wait_for_previous();
    const GemvProduct &product = product_of_pair(launch, pair);
    const uint32_t row = (pair - product.first_pair) * gemv_rows + lane;
    const bool mine = (blockIdx.x * gemv_warps + warp) / warps < launch.n_pairs && warp % warps == 0 &&
                      lane < gemv_rows && row < product.n_rows;
    const float before = mine ? value_before(product, row) : 0.0f;
    BlockVectors<type, 1> vectors(launch.vectors, shared, warp_sums);
    vectors.stage(0);
    float sum[gemv_rows][1] = {};
    multiply_group(ahead, group, rows, n_slices, rows, 1, vectors.staged, sum);
    const float a = warp_sum(sum[0][0]), b = warp_sum(sum[1][0]);
    if (lane < gemv_rows)
        parts[warp][lane] = lane == 0 ? a : b;
    __syncthreads();
    if (!mine)
        return;
    float total = 0;
    for (uint32_t w = 0; w < warps; ++w)
        total += parts[warp + w][lane];
    const float value = total * vectors.scale[0] + before;
    product.out[row] = product.relu != 0 ? fmaxf(value, 0.0f) : value;
}

// How many warps a pair of rows has, a power of two; 0 where rows are too many for a turn, or the vector for
// shared memory.
template <int type>
uint32_t warps_of_pair(const pi_gpu &gpu, const GemvLaunch &work) {
    const uint32_t n_warps = 2u * static_cast<uint32_t>(gpu.n_processors) * gemv_warps;
    if (work.n_pairs > n_warps || work.vectors.n_cols > vector_chunk<type, 1>)
        return 0;
    uint32_t n = 1;
    while (2 * n <= gemv_warps && 2 * n * work.n_pairs <= n_warps &&
           2 * n * warp_size * Type<type>::width <= work.vectors.n_cols)
        n *= 2;
    return n;
}

template <int type, int columns>
void start_gemv(pi_gpu &gpu, const GemvLaunch &work) {
    launch_early("multiplying rows", gpu, gemv_kernel<type, columns>, gemv_blocks(gpu, work.n_pairs),
                 gemv_threads, vectors_bytes<type, columns>(work.vectors.n_cols), work);
}

template <int type>
void start_single(pi_gpu &gpu, const GemvLaunch &work) {
    const uint32_t warps = warps_of_pair<type>(gpu, work);
    if (warps == 0)
        return start_gemv<type, 1>(gpu, work);
    launch_early("multiplying rows", gpu, one_turn_kernel<type>, ceil_div(work.n_pairs * warps, gemv_warps),
                 gemv_threads, vectors_bytes<type, 1>(work.vectors.n_cols), work, warps);
}

// Defined once for each type (gemv_*.cu), so that they compile beside each other.
template <int type>
void run_gemv(pi_gpu &gpu, const GemvLaunch &work);
template <int type>
void run_neurons(pi_gpu &gpu, const NeuronsLaunch &work);

#define PI_DEFINE_GEMV(type)                                                                                 \
    template <>                                                                                              \
    void run_gemv<type>(pi_gpu & gpu, const GemvLaunch &work) {                                              \
        if (work.vectors.n_columns == 1)                                                                     \
            return start_single<type>(gpu, work);                                                            \
        if (work.vectors.n_columns == 2)                                                                     \
            return start_gemv<type, 2>(gpu, work);                                                           \
        if (work.vectors.n_columns <= 4)                                                                     \
            return start_gemv<type, 4>(gpu, work);                                                           \
        return start_gemv<type, 8>(gpu, work);                                                               \
    }                                                                                                        \
    template <>                                                                                              \
    void run_neurons<type>(pi_gpu & gpu, const NeuronsLaunch &work) {                                        \
        start_neurons<type>(gpu, work);                                                                      \
    }

} // namespace pi_cuda
