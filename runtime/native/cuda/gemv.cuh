// gemv.cuh: products of a few vectors with rows of a matrix, dequantised in registers. A warp computes two
// rows for all columns; the block's warps share the vectors in shared memory.
#pragma once

#include "k_quants.cuh"

namespace pi_cuda {

constexpr int gemv_warps = 8;
constexpr int gemv_rows = 2; // of a warp
constexpr int gemv_block_rows = gemv_warps * gemv_rows;
constexpr uint32_t gemv_shared_floats = 8192;
constexpr uint32_t gemv_max_columns = 8;

// One product of a launch. With an index, output r is of row index[r], for r < *n_listed.
struct GemvProduct {
    const uint8_t *data;
    uint64_t row_stride;
    uint32_t n_rows;
    uint32_t first_block; // of the grid
    const float *bias;    // [n_rows] or null
    float *out;           // [n_columns, n_rows]
    const int32_t *index;
    const uint32_t *n_listed;
    const float *factor; // [n_rows] or null: multiplies output r
};

struct GemvLaunch {
    GemvProduct product[PI_GPU_MAX_PRODUCTS];
    uint32_t n_products;
    uint32_t n_cols;
    uint32_t n_columns; // at most the kernel's
    const float *x;     // [n_columns, n_cols]
};

// Where float4 number f of a vector is kept: lanes that read 4, 8, 16 or 32 consecutive elements each find
// them in different banks.
__device__ __forceinline__ uint32_t swizzled(uint32_t f) {
    return f ^ (f >> 3 & 7u);
}

// Vectors [columns, begin .. begin + n) into shared memory, column by column, stride float4s apart.
template <int columns>
__device__ __forceinline__ void stage_vectors(const GemvLaunch &launch, uint32_t begin, uint32_t n,
                                              uint32_t stride, float4 *shared) {
#pragma unroll
    for (int c = 0; c < columns; ++c) {
        const uint32_t column = min(static_cast<uint32_t>(c), launch.n_columns - 1);
        const auto *from =
            reinterpret_cast<const float4 *>(launch.x + uint64_t{launch.n_cols} * column + begin);
        for (uint32_t f = threadIdx.x; f < n / 4; f += blockDim.x)
            shared[c * stride + swizzled(f)] = from[f];
    }
}

template <int type, int columns>
__device__ __forceinline__ void multiply_slice(const typename Type<type>::Packed *packed,
                                               const float4 *shared, uint32_t stride, uint32_t slice,
                                               float (*sum)[columns]) {
    constexpr int width = Type<type>::width;
    constexpr bool scaled_after = requires { Type<type>::scale(packed[0]); };
    float weight[gemv_rows][width], scale[gemv_rows];
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r) {
        scale[r] = 1.0f;
        if constexpr (scaled_after) {
            Type<type>::quants(packed[r], weight[r]);
            scale[r] = Type<type>::scale(packed[r]);
        } else {
            Type<type>::unpack(packed[r], weight[r]);
        }
    }
#pragma unroll
    for (int c = 0; c < columns; ++c) {
        float part[gemv_rows] = {};
#pragma unroll
        for (int j = 0; j < width / 4; ++j) {
            const float4 x = shared[c * stride + swizzled(slice * (width / 4) + j)];
#pragma unroll
            for (int r = 0; r < gemv_rows; ++r) {
                const float *w = weight[r] + 4 * j;
                part[r] += w[0] * x.x + w[1] * x.y + w[2] * x.z + w[3] * x.w;
            }
        }
#pragma unroll
        for (int r = 0; r < gemv_rows; ++r)
            sum[r][c] += part[r] * scale[r];
    }
}

__device__ __forceinline__ const GemvProduct &product_of_block(const GemvLaunch &launch) {
    uint32_t i = 0;
    while (i + 1 < launch.n_products && blockIdx.x >= launch.product[i + 1].first_block)
        ++i;
    return launch.product[i];
}

template <int columns>
__device__ __forceinline__ void write_outputs(const GemvProduct &product, uint32_t n_columns,
                                              uint32_t first_row, uint32_t n_rows, float (*sum)[columns]) {
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r) {
        const uint32_t row = first_row + r;
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            float value = warp_sum(sum[r][c]);
            if (row >= n_rows || static_cast<uint32_t>(c) >= n_columns || threadIdx.x % warp_size != 0)
                continue;
            if (product.bias != nullptr)
                value += product.bias[row];
            if (product.factor != nullptr)
                value *= product.factor[row];
            product.out[uint64_t{product.n_rows} * c + row] = value;
        }
    }
}

template <int type, int columns>
__global__ void __launch_bounds__(gemv_warps *warp_size)
    gemv_kernel(const __grid_constant__ GemvLaunch launch) {
    PI_SHARED(float4, shared);
    constexpr uint32_t chunk = gemv_shared_floats / columns; // a multiple of 1024
    constexpr uint32_t stride = chunk / 4;
    constexpr uint32_t width = Type<type>::width;
    const GemvProduct &product = product_of_block(launch);
    const uint32_t n_rows = product.n_listed == nullptr ? product.n_rows : *product.n_listed;
    const uint32_t block_row = (blockIdx.x - product.first_block) * gemv_block_rows;
    if (block_row >= n_rows)
        return; // the whole block: the list is shorter
    const uint32_t first_row = block_row + threadIdx.x / warp_size * gemv_rows;
    const uint32_t lane = threadIdx.x % warp_size;

    constexpr uint32_t block_elements = layouts[type].block_elements;
    RowView row[gemv_rows];
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r) {
        const uint32_t output =
            min(first_row + r, n_rows - 1); // rows beyond the last are computed, not written
        const uint32_t at = product.index == nullptr ? output : static_cast<uint32_t>(product.index[output]);
        row[r] = {product.data + product.row_stride * at, launch.n_cols / block_elements};
    }
    float sum[gemv_rows][columns] = {};
    for (uint32_t begin = 0; begin < launch.n_cols; begin += chunk) {
        const uint32_t n = min(chunk, launch.n_cols - begin);
        __syncthreads();
        stage_vectors<columns>(launch, begin, n, stride, shared);
        __syncthreads();
        for (uint32_t slice = lane; slice < n / width; slice += warp_size) {
            typename Type<type>::Packed packed[gemv_rows];
#pragma unroll
            for (int r = 0; r < gemv_rows; ++r)
                packed[r] = Type<type>::load(row[r], begin / width + slice);
            multiply_slice<type, columns>(packed, shared, stride, slice, sum);
        }
    }
    write_outputs<columns>(product, launch.n_columns, first_row, n_rows, sum);
}

template <int type, int columns>
void start_gemv(pi_gpu &gpu, const GemvLaunch &work, uint32_t n_blocks) {
    launch("multiplying rows", gpu, gemv_kernel<type, columns>, n_blocks, gemv_warps * warp_size,
           gemv_shared_floats * sizeof(float), work);
}

// Defined once for each type (gemv_*.cu), so that they compile beside each other.
template <int type>
void run_gemv(pi_gpu &gpu, const GemvLaunch &work, uint32_t n_blocks);

#define PI_DEFINE_GEMV(type)                                                                                 \
    template <>                                                                                              \
    void run_gemv<type>(pi_gpu & gpu, const GemvLaunch &work, uint32_t n_blocks) {                           \
        if (work.n_columns == 1)                                                                             \
            return start_gemv<type, 1>(gpu, work, n_blocks);                                                 \
        if (work.n_columns == 2)                                                                             \
            return start_gemv<type, 2>(gpu, work, n_blocks);                                                 \
        if (work.n_columns <= 4)                                                                             \
            return start_gemv<type, 4>(gpu, work, n_blocks);                                                 \
        return start_gemv<type, 8>(gpu, work, n_blocks);                                                     \
    }

} // namespace pi_cuda
