// gemv.cuh: products of a few vectors with rows of matrices. Each block has an equal part of all rows of a
// launch, as many blocks as processors; its first rows are on their way before the vectors are.
#pragma once

#include "all_neurons.cuh"
#include "rows.cuh"

#include <algorithm>

namespace pi_cuda {

// One product of a launch.
struct GemvProduct {
    const uint8_t *rows; // those of the launch count from here
    uint32_t first_row;  // of the launch, 2^32 - 1 beyond the last product
    uint32_t n_rows;
    const float *bias; // [n_rows] or null
    float *out;        // [n_columns, n_rows]
    uint32_t add;      // to what out holds
    uint32_t relu;     // 0 instead of what is below
};

struct GemvLaunch {
    GemvProduct product[PI_GPU_MAX_PRODUCTS];
    uint32_t n_rows;
    uint32_t row_stride;
    Vectors vectors;
    float *normed; // [n_columns, n_cols] for vectors that must be normalised before, or null
    Shares shares;
    uint32_t block_rows, n_larger; // the first n_larger blocks have a row more
};

__device__ __forceinline__ uint32_t product_of_row(const GemvLaunch &launch, uint32_t row) {
    uint32_t of = 0;
#pragma unroll
    for (int i = 1; i < PI_GPU_MAX_PRODUCTS; ++i)
        of += row >= launch.product[i].first_row ? 1 : 0;
    return of;
}

// What is added to a row's product.
__device__ __forceinline__ float value_before(const GemvLaunch &launch, uint32_t row, uint32_t column) {
    const GemvProduct &product = launch.product[product_of_row(launch, row)];
    const uint32_t i = row - product.first_row;
    const float bias = product.bias == nullptr ? 0.0f : product.bias[i];
    return product.add == 0 ? bias : bias + __ldcg(product.out + uint64_t{product.n_rows} * column + i);
}

__device__ __forceinline__ void write_output(const GemvLaunch &launch, uint32_t row, uint32_t column,
                                             float value) {
    const GemvProduct &product = launch.product[product_of_row(launch, row)];
    product.out[uint64_t{product.n_rows} * column + (row - product.first_row)] =
        product.relu != 0 ? fmaxf(value, 0.0f) : value;
}

template <int type, int columns>
__global__ void __launch_bounds__(tile_threads, 1) gemv_kernel(const __grid_constant__ GemvLaunch launch) {
    PI_SHARED(uint4, shared);
    __shared__ float square_sums[columns * tile_warps];
    const uint32_t first = blockIdx.x * launch.block_rows + min(blockIdx.x, launch.n_larger);
    const uint32_t n_rows = launch.block_rows + (blockIdx.x < launch.n_larger ? 1 : 0);
    const auto rows_of = [&](uint32_t tile) {
        RowPair rows;
#pragma unroll
        for (uint32_t r = 0; r < 2; ++r) {
            const uint32_t row =
                first + min(tile * rows_of_tile + threadIdx.x % warp_size / 4 + 8 * r, n_rows - 1);
            rows.row[r] = {launch.product[product_of_row(launch, row)].rows +
                               uint64_t{launch.row_stride} * row,
                           launch.vectors.stride / layouts[type].block_elements};
        }
        return rows;
    };
    Tiles<type, columns> tiles(launch.vectors, launch.shares, shared, square_sums);
    tiles.begin(rows_of, 0);
    let_next_begin();
    wait_for_previous();
    const uint32_t own_row = threadIdx.x / columns, own_column = threadIdx.x % columns;
    const float own_before = own_row < n_rows && own_column < launch.vectors.n_columns
                                 ? value_before(launch, first + own_row, own_column)
                                 : 0.0f; // on its way early
    tiles.stage();
    tiles.multiply(rows_of, (n_rows + rows_of_tile - 1) / rows_of_tile, [&](uint32_t begin, uint32_t end) {
        begin *= rows_of_tile;
        const uint32_t n_sums = (min(end * rows_of_tile, n_rows) - begin) * columns;
        for (uint32_t i = threadIdx.x; i < n_sums; i += tile_threads) {
            const uint32_t row = first + begin + i / columns, column = i % columns;
            if (column >= launch.vectors.n_columns)
                continue;
            const float before =
                begin == 0 && i == threadIdx.x ? own_before : value_before(launch, row, column);
            write_output(launch, row, column, tiles.total(i / columns, column) + before);
        }
    });
}

// Columns [begin, end) of the vectors.
inline GemvLaunch some_vectors(GemvLaunch work, uint32_t begin, uint32_t end) {
    work.vectors.n_columns = end - begin;
    work.vectors.x += uint64_t{work.vectors.stride} * begin;
    if (work.normed != nullptr)
        work.normed += uint64_t{work.vectors.stride} * begin;
    for (GemvProduct &product : work.product)
        product.out += uint64_t{product.n_rows} * begin;
    return work;
}

// Elements [begin, begin + n) of what is left of vectors and rows.
inline GemvLaunch some_elements(GemvLaunch work, uint32_t begin, uint32_t n) {
    const bool last = begin + n == work.vectors.n_cols;
    work.vectors.x += begin;
    work.vectors.first += begin;
    work.vectors.n_cols = n;
    for (GemvProduct &product : work.product) {
        product.relu = last ? product.relu : 0;
        product.bias = begin == 0 ? product.bias : nullptr;
        product.add = begin == 0 ? product.add : 1;
    }
    return work;
}

template <int type, int columns>
void start_gemv(pi_gpu &gpu, GemvLaunch work);

// In two halves what does not fit shared memory: of the vectors, of the one vector.
template <int type, int columns>
void start_halves(pi_gpu &gpu, GemvLaunch work) {
    const uint32_t n = work.vectors.n_columns;
    if constexpr (columns > 1) {
        start_gemv<type, columns / 2>(gpu, some_vectors(work, 0, std::min<uint32_t>(n, columns / 2)));
        if (n > columns / 2)
            start_gemv<type, columns / 2>(gpu, some_vectors(work, columns / 2, n));
        return;
    }
    if (work.vectors.gain != nullptr) {
        if (work.normed == nullptr)
            throw Failure{PI_FAILURE, "no room for a vector's norm"};
        normalise(gpu, work.vectors.x, work.vectors.gain, 1, work.vectors.n_cols, work.vectors.eps,
                  work.normed);
        work.vectors.x = work.normed;
        work.vectors.gain = nullptr;
    }
    const uint32_t half = work.vectors.n_cols / 512 * 256;
    start_gemv<type, columns>(gpu, some_elements(work, 0, half));
    start_gemv<type, columns>(gpu, some_elements(work, half, work.vectors.n_cols - half));
}

template <int type, int columns>
void start_gemv(pi_gpu &gpu, GemvLaunch work) {
    const unsigned blocks = tile_blocks(gpu, work.n_rows);
    work.shares =
        shares_of<type, columns>(work.vectors.n_cols, ceil_div(work.n_rows, blocks), most_shared_bytes(gpu));
    if (work.shares.most_rows == 0)
        return start_halves<type, columns>(gpu, work);
    work.block_rows = work.n_rows / blocks;
    work.n_larger = work.n_rows % blocks;
    launch_early("multiplying rows", gpu, gemv_kernel<type, columns>, blocks, tile_threads,
                 tiles_bytes<type, columns>(work.shares), work);
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
        if (!start_all_neurons<type>(gpu, work))                                                             \
            start_neurons<type>(gpu, work);                                                                  \
    }

} // namespace pi_cuda
