// gemv.cuh: products of a few vectors with rows of matrices, a pair of rows a warp and turn. Blocks are as
// many as the device holds, so that each stages the vectors once; the first rows are on their way before
// that.
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

template <int type, int columns>
__global__ void __launch_bounds__(gemv_threads, 2) gemv_kernel(const __grid_constant__ GemvLaunch launch) {
    PI_SHARED(uint4, shared);
    __shared__ float warp_sums[warp_size];
    const auto rows_of = [&](uint32_t pair) {
        const GemvProduct &product = product_of_pair(launch, pair);
        RowPair rows;
#pragma unroll
        for (int r = 0; r < gemv_rows; ++r) { // a row beyond the last is computed, not written
            const uint32_t row = min((pair - product.first_pair) * gemv_rows + r, product.n_rows - 1);
            rows.row[r] = {product.data + product.row_stride * row,
                           launch.vectors.n_cols / layouts[type].block_elements};
        }
        return rows;
    };
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

template <int type, int columns>
void start_gemv(pi_gpu &gpu, const GemvLaunch &work) {
    launch_early("multiplying rows", gpu, gemv_kernel<type, columns>, gemv_blocks(gpu, work.n_pairs),
                 gemv_threads, vectors_bytes<type, columns>(work.vectors.n_cols), work);
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
            return start_gemv<type, 1>(gpu, work);                                                           \
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
