// gemv.cuh: products of a few vectors with rows of a matrix, dequantised in registers. A warp computes two
// rows for all columns; the block's warps share the vectors in shared memory. A vector that is to be
// normalised is multiplied by the gains there, and the sums by 1 / rms in the end, so that no launch is
// needed before.
#pragma once

#include "k_quants.cuh"

namespace pi_cuda {

constexpr int gemv_warps = 8;
constexpr int gemv_rows = 2; // of a warp
constexpr int gemv_block_rows = gemv_warps * gemv_rows;
constexpr uint32_t gemv_shared_floats = 8192;
constexpr uint32_t gemv_max_columns = 8;

// One product of a launch.
struct GemvProduct {
    const uint8_t *data;
    uint64_t row_stride;
    uint32_t n_rows;
    uint32_t first_block; // of the grid
    const float *bias;    // [n_rows] or null
    float *out;           // [n_columns, n_rows]
    uint32_t add;         // to what out holds
    uint32_t relu;        // 0 instead of what is below
};

struct GemvLaunch {
    GemvProduct product[PI_GPU_MAX_PRODUCTS];
    uint32_t n_products;
    uint32_t n_cols;
    uint32_t n_columns; // at most the kernel's
    const float *x;     // [n_columns, n_cols]
    const float *gain;  // [n_cols] or null: x as it is
    float eps;
};

// Where float4 number f of a vector is kept: lanes that read 4, 8, 16 or 32 consecutive elements each find
// them in different banks.
__device__ __forceinline__ uint32_t swizzled(uint32_t f) {
    return f ^ (f >> 3 & 7u);
}

// Vectors [columns, begin .. begin + n) times the gains into shared memory, column by column, stride float4s
// apart; squares: of what the thread met.
template <int columns>
__device__ __forceinline__ void stage_vectors(const GemvLaunch &launch, uint32_t begin, uint32_t n,
                                              uint32_t stride, float4 *shared, float (&squares)[columns]) {
    const auto *gain =
        reinterpret_cast<const float4 *>(launch.gain == nullptr ? nullptr : launch.gain + begin);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
        const uint32_t column = min(static_cast<uint32_t>(c), launch.n_columns - 1);
        const auto *from =
            reinterpret_cast<const float4 *>(launch.x + uint64_t{launch.n_cols} * column + begin);
        for (uint32_t f = threadIdx.x; f < n / 4; f += blockDim.x) {
            float4 x = from[f];
            if (gain != nullptr) {
                squares[c] += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
                const float4 g = gain[f];
                x = {x.x * g.x, x.y * g.y, x.z * g.z, x.w * g.w};
            }
            shared[c * stride + swizzled(f)] = x;
        }
    }
}

// 1 / rms of a vector of which every thread has met a part; 1 without gains.
__device__ __forceinline__ float norm_scale(const GemvLaunch &launch, float squares, float *shared) {
    if (launch.gain == nullptr)
        return 1.0f;
    return 1.0f / sqrtf(block_sum(squares, shared) / static_cast<float>(launch.n_cols) + launch.eps);
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
                                              uint32_t first_row, uint32_t n_rows, float (*sum)[columns],
                                              const float (&scale)[columns]) {
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r) {
        const uint32_t row = first_row + r;
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            float value = warp_sum(sum[r][c]) * scale[c];
            if (row >= n_rows || static_cast<uint32_t>(c) >= n_columns || threadIdx.x % warp_size != 0)
                continue;
            if (product.bias != nullptr)
                value += product.bias[row];
            float &out = product.out[uint64_t{product.n_rows} * c + row];
            value = product.add != 0 ? out + value : value;
            out = product.relu != 0 ? fmaxf(value, 0.0f) : value;
        }
    }
}

template <int type, int columns>
__global__ void __launch_bounds__(gemv_warps *warp_size)
    gemv_kernel(const __grid_constant__ GemvLaunch launch) {
    PI_SHARED(float4, shared);
    __shared__ float warp_sums[warp_size];
    constexpr uint32_t chunk = gemv_shared_floats / columns; // a multiple of 1024
    constexpr uint32_t stride = chunk / 4;
    constexpr uint32_t width = Type<type>::width;
    const GemvProduct &product = product_of_block(launch);
    const uint32_t n_rows = product.n_rows;
    const uint32_t block_row = (blockIdx.x - product.first_block) * gemv_block_rows;
    const uint32_t first_row = block_row + threadIdx.x / warp_size * gemv_rows;
    const uint32_t lane = threadIdx.x % warp_size;

    constexpr uint32_t block_elements = layouts[type].block_elements;
    RowView row[gemv_rows];
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r) {
        const uint32_t at = min(first_row + r, n_rows - 1); // rows beyond the last are computed, not written
        row[r] = {product.data + product.row_stride * at, launch.n_cols / block_elements};
    }
    float sum[gemv_rows][columns] = {}, squares[columns] = {};
    for (uint32_t begin = 0; begin < launch.n_cols; begin += chunk) {
        const uint32_t n = min(chunk, launch.n_cols - begin);
        __syncthreads();
        stage_vectors<columns>(launch, begin, n, stride, shared, squares);
        __syncthreads();
        for (uint32_t slice = lane; slice < n / width; slice += warp_size) {
            typename Type<type>::Packed packed[gemv_rows];
#pragma unroll
            for (int r = 0; r < gemv_rows; ++r)
                packed[r] = Type<type>::load(row[r], begin / width + slice);
            multiply_slice<type, columns>(packed, shared, stride, slice, sum);
        }
    }
    float scale[columns];
#pragma unroll
    for (int c = 0; c < columns; ++c)
        scale[c] = norm_scale(launch, squares[c], warp_sums);
    write_outputs<columns>(product, launch.n_columns, first_row, n_rows, sum, scale);
}

template <int type, int columns>
void start_gemv(pi_gpu &gpu, const GemvLaunch &work, uint32_t n_blocks) {
    launch("multiplying rows", gpu, gemv_kernel<type, columns>, n_blocks, gemv_warps * warp_size,
           gemv_shared_floats * sizeof(float), work);
}

// A token's neurons: their gates, and where those are open their ups; or in two launches, where the types
// differ, first the activations alone, then the ups of those that are not 0.
struct NeuronsLaunch {
    GemvLaunch input;    // one column
    const uint8_t *gate; // or null: out holds the activations
    const uint8_t *up;   // or null: out gets the activations
    uint64_t row_stride;
    uint32_t n_rows;
    const uint32_t *mask; // bit i: neuron i is let through; or null: all are
    uint32_t relu;        // 1: closed up to the threshold; 0: SiLU, never closed
    float threshold;
    float *out;                              // [n_rows]
    unsigned long long *n_masked, *n_active; // added to, or null
};

// The warp's rows that are open, for the whole vector; of a row that is not the result is another's. The
// first call stages the vector, the second finds it where one chunk holds it.
template <int type>
__device__ __forceinline__ void dot_rows(const NeuronsLaunch &work, const uint8_t *data, uint32_t first_row,
                                         const bool (&open)[gemv_rows], bool staged, float4 *shared,
                                         float (&squares)[1], float (&sum)[gemv_rows][1]) {
    constexpr uint32_t width = Type<type>::width;
    const GemvLaunch &input = work.input;
    const bool any = open[0] || open[1];
    RowView row[gemv_rows];
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r) {
        const uint32_t of = first_row + (open[r] ? r : 1 - r);
        row[r] = {data + work.row_stride * (any ? of : 0), input.n_cols / layouts[type].block_elements};
    }
    for (uint32_t begin = 0; begin < input.n_cols; begin += gemv_shared_floats) {
        const uint32_t n = min(gemv_shared_floats, input.n_cols - begin);
        if (!staged) {
            __syncthreads();
            stage_vectors<1>(input, begin, n, 0, shared, squares);
            __syncthreads();
        }
        for (uint32_t slice = threadIdx.x % warp_size; any && slice < n / width; slice += warp_size) {
            typename Type<type>::Packed packed[gemv_rows];
#pragma unroll
            for (int r = 0; r < gemv_rows; ++r)
                packed[r] = Type<type>::load(row[r], begin / width + slice);
            multiply_slice<type, 1>(packed, shared, 0, slice, sum);
        }
    }
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r)
        sum[r][0] = warp_sum(sum[r][0]);
}

template <int type>
__global__ void __launch_bounds__(gemv_warps *warp_size)
    neurons_kernel(const __grid_constant__ NeuronsLaunch work) {
    PI_SHARED(float4, shared);
    __shared__ float warp_sums[warp_size];
    __shared__ uint32_t counts[2];
    if (threadIdx.x < 2)
        counts[threadIdx.x] = 0;
    const uint32_t lane = threadIdx.x % warp_size;
    const uint32_t first_row = blockIdx.x * gemv_block_rows + threadIdx.x / warp_size * gemv_rows;
    bool open[gemv_rows];
    float value[gemv_rows], sum[gemv_rows][1] = {}, squares[1] = {};
    uint32_t n_masked = 0, n_active = 0;
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r) {
        const uint32_t i = first_row + r;
        open[r] = i < work.n_rows && (work.mask == nullptr || (work.mask[i / 32] >> (i % 32) & 1) != 0);
        value[r] = work.gate == nullptr && open[r] ? work.out[i] : 0.0f;
        n_masked += open[r] ? 1 : 0;
    }
    float scale = 0;
    if (work.gate != nullptr) {
        dot_rows<type>(work, work.gate, first_row, open, false, shared, squares, sum);
        scale = norm_scale(work.input, squares[0], warp_sums);
    }
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r) {
        if (work.gate != nullptr) {
            const float gate = sum[r][0] * scale;
            open[r] = open[r] && (work.relu == 0 || gate > work.threshold);
            value[r] = !open[r] ? 0.0f : work.relu != 0 ? gate : silu(gate);
        }
        open[r] = open[r] && value[r] != 0;
        n_active += open[r] ? 1 : 0;
        sum[r][0] = 0;
    }
    if (work.up != nullptr) {
        const bool staged = work.gate != nullptr && work.input.n_cols <= gemv_shared_floats;
        dot_rows<type>(work, work.up, first_row, open, staged, shared, squares, sum);
        if (work.gate == nullptr)
            scale = norm_scale(work.input, squares[0], warp_sums);
    }
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r) {
        if (lane == 0 && first_row + r < work.n_rows)
            work.out[first_row + r] =
                work.up == nullptr || !open[r] ? value[r] : value[r] * (sum[r][0] * scale);
    }
    if (work.n_active == nullptr)
        return;
    if (lane == 0) {
        atomicAdd(&counts[0], n_masked);
        atomicAdd(&counts[1], n_active);
    }
    __syncthreads();
    if (threadIdx.x == 0 && work.n_masked != nullptr && counts[0] > 0)
        atomicAdd(work.n_masked, static_cast<unsigned long long>(counts[0]));
    if (threadIdx.x == 0 && counts[1] > 0)
        atomicAdd(work.n_active, static_cast<unsigned long long>(counts[1]));
}

template <int type>
void start_neurons(pi_gpu &gpu, const NeuronsLaunch &work) {
    launch("a token's neurons", gpu, neurons_kernel<type>, ceil_div(work.n_rows, gemv_block_rows),
           gemv_warps * warp_size, gemv_shared_floats * sizeof(float), work);
}

// Defined once for each type (gemv_*.cu), so that they compile beside each other.
template <int type>
void run_gemv(pi_gpu &gpu, const GemvLaunch &work, uint32_t n_blocks);
template <int type>
void run_neurons(pi_gpu &gpu, const NeuronsLaunch &work);

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
    }                                                                                                        \
    template <>                                                                                              \
    void run_neurons<type>(pi_gpu & gpu, const NeuronsLaunch &work) {                                        \
        start_neurons<type>(gpu, work);                                                                      \
    }

} // namespace pi_cuda
