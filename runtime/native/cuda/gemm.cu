// gemm.cu: large products on the matrix units, float16 with float32 sums: 128 or 64 tokens x 128 outputs a
// block of four warps, each 64 outputs of half the tokens; four stages of 32 inputs in shared memory, of
// which three are on their way while one is used.
#include "cublaslt.h"
#include "mma.cuh"
#include "rows.cuh"

#include <type_traits>

namespace pi_cuda {
namespace {

constexpr int outputs = 128; // of a block
constexpr int depth = 32;    // of a stage
constexpr int n_threads = 128;
constexpr int n_stages = 4;
constexpr float largest_half = 32768.0f;

__device__ __forceinline__ float magnitude(float x) {
    return fabsf(x);
}
__device__ __forceinline__ float magnitude(float4 x) {
    return fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
}
__device__ __forceinline__ __half rounded(float x, float scale) {
    return __float2half_rn(x * scale);
}
__device__ __forceinline__ uint2 rounded(float4 x, float scale) {
    return {pack_halves(x.x * scale, x.y * scale), pack_halves(x.z * scale, x.w * scale)};
}

// A block a token: the largest magnitude decides the scale. n is a multiple of 4, or `by` is 1.
template <uint32_t by>
__global__ void to_halves_kernel(const float *x, uint32_t n, uint32_t n_k, __half *out, float *scale) {
    using Floats = std::conditional_t<by == 4, float4, float>;
    using Pieces = std::conditional_t<by == 4, uint2, __half>;
    __shared__ float shared[warp_size];
    const auto *row = reinterpret_cast<const Floats *>(x + uint64_t{n} * blockIdx.x);
    float largest = 0;
    for (uint32_t i = threadIdx.x; i < n / by; i += blockDim.x)
        largest = fmaxf(largest, magnitude(row[i]));
    largest = block_max(largest, shared);
    int exponent = 0;
    if (largest > largest_half && largest < INFINITY)
        exponent = ilogbf(largest) - 14;
    const float down = ldexpf(1.0f, -exponent);
    auto *to = reinterpret_cast<Pieces *>(out + uint64_t{n_k} * blockIdx.x);
    for (uint32_t i = threadIdx.x; i < n_k / by; i += blockDim.x)
        to[i] = rounded(i < n / by ? row[i] : Floats{}, down);
    if (threadIdx.x == 0)
        scale[blockIdx.x] = ldexpf(1.0f, exponent);
}

// Of a row of `per_row` pieces of 16 bytes (4: inputs of a row of x or of w [rows, k]; 16: outputs of w [k,
// n]), the place of a piece: rows that a load reads together fall into different banks. In halves.
template <int per_row>
__device__ __forceinline__ uint32_t place_of(uint32_t row, uint32_t piece) {
    return row * per_row * 8 + (piece ^ (per_row == 4 ? row / 2 % 4 : row % 8)) * 8;
}

// What a thread copies of each stage: pieces of one column, `rows_apart` rows from one to the next.
template <int per_row, int n_rows>
struct Copies {
    static constexpr uint32_t rows_apart = n_threads / per_row, n = n_rows / rows_apart;

    const __half *from; // the first piece
    uint64_t apart;     // of the pieces
    uint32_t row, column;

    // Of the matrix [.., stride] from there on.
    __device__ __forceinline__ Copies(const __half *matrix, uint32_t stride)
        : apart(uint64_t{stride} * rows_apart), row(threadIdx.x / per_row),
          column(threadIdx.x % per_row * 8) {
        from = matrix + uint64_t{stride} * row + column;
    }

    // Starts those of a stage `offset` elements on, where so many rows and columns are left; zeros outside.
    __device__ __forceinline__ void start(uint64_t offset, uint32_t rows_left, uint32_t columns_left,
                                          __half *to) const {
        const bool column_inside = column < columns_left;
#pragma unroll
        for (uint32_t i = 0; i < n; ++i) {
            const bool inside = column_inside && row + i * rows_apart < rows_left;
            const __half *piece = from + offset + i * apart;
            copy_async(to + place_of<per_row>(row, column / 8) + i * rows_apart * per_row * 8,
                       inside ? piece : from, inside);
        }
    }
};

// A warp's fragments of 16 inputs: `tiles` times 16 tokens, and 64 outputs.
template <int tiles>
struct Fragments {
    uint32_t a[tiles][4], b[4][4];
};

// Inputs k and on (0 or 16) of a stage.
template <int tiles, bool transposed>
__device__ __forceinline__ void load_fragments(const __half *x, const __half *w, uint32_t k,
                                               uint32_t warp_token, uint32_t warp_out, Fragments<tiles> &to) {
    const uint32_t lane = threadIdx.x % warp_size, low = lane % 16, high = lane / 16;
#pragma unroll
    for (uint32_t i = 0; i < tiles; ++i)
        load_matrices(x + place_of<4>(low, k / 8 + high) + (warp_token + 16 * i) * depth, to.a[i]);
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
        if constexpr (transposed)
            load_transposed(w + place_of<16>(k + low, warp_out / 8 + 2 * j + high), to.b[j]);
        else
            load_matrices(w + place_of<4>(lane % 8 + high * 8, k / 8 + lane / 8 % 2) +
                              (warp_out + 16 * j) * depth,
                          to.b[j]);
    }
}

template <int tiles>
__device__ __forceinline__ void multiply_fragments(const Fragments<tiles> &of, float (&sum)[tiles][8][4]) {
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
            multiply_add(sum[i][j], of.a[i], of.b[j / 2][j % 2 * 2], of.b[j / 2][j % 2 * 2 + 1]);
    }
}

// Two neighbouring outputs of a token, of which the second may be one too many.
__device__ __forceinline__ void write_pair(const Gemm &work, uint32_t column, float scale, bool aligned,
                                           float *to, float first, float second) {
    float value[2] = {first * scale, second * scale};
    const bool both = column + 1 < work.n_out;
    if (work.bias != nullptr) {
        value[0] += work.bias[column];
        value[1] += both ? work.bias[column + 1] : 0.0f;
    }
    if (work.accumulate) {
        value[0] += to[0];
        value[1] += both ? to[1] : 0.0f;
    }
    if (work.relu) {
        value[0] = fmaxf(value[0], 0.0f);
        value[1] = fmaxf(value[1], 0.0f);
    }
    if (both && aligned) {
        *reinterpret_cast<float2 *>(to) = {value[0], value[1]};
    } else {
        to[0] = value[0];
        if (both)
            to[1] = value[1];
    }
}

template <int tiles>
__device__ __forceinline__ void write_tile(const Gemm &work, uint32_t token, uint32_t out,
                                           const float (&sum)[tiles][8][4]) {
    const uint32_t lane = threadIdx.x % warp_size;
    const bool aligned = work.out_stride % 2 == 0 && reinterpret_cast<uintptr_t>(work.out) % 8 == 0;
#pragma unroll
    for (int i = 0; i < tiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t t = token + 16 * i + lane / 4 + 8 * half;
            if (t >= work.x.n_tokens)
                continue;
            const float scale = work.x.scale[t];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const uint32_t column = out + 8 * j + lane % 4 * 2;
                if (column < work.n_out)
                    write_pair(work, column, scale, aligned,
                               work.out + uint64_t{work.out_stride} * t + column, sum[i][j][2 * half],
                               sum[i][j][2 * half + 1]);
            }
        }
    }
}

// Block (tokens, outputs): those of the same outputs run together, so that w is read from far away once. The
// fragments of the next 16 inputs are loaded while those before are multiplied.
template <int tokens, bool transposed>
__global__ void __launch_bounds__(n_threads, 2) gemm_kernel(const __grid_constant__ Gemm work) {
    constexpr int tiles = tokens / 32, w_pieces = transposed ? outputs / 8 : depth / 8;
    constexpr uint32_t x_halves = tokens * depth, stage_halves = x_halves + outputs * depth;
    PI_SHARED(__half, memory); // [n_stages][x, w]
    const uint32_t first_token = blockIdx.x * tokens, first_out = blockIdx.y * outputs;
    const uint32_t warp = threadIdx.x / warp_size, warp_token = warp / 2 * 16 * tiles,
                   warp_out = warp % 2 * 64;
    const Copies<depth / 8, tokens> x_copies(work.x.data + work.k_begin + uint64_t{work.x.n_k} * first_token,
                                             work.x.n_k);
    const Copies<w_pieces, transposed ? depth : outputs> w_copies(
        work.w + (transposed ? first_out : uint64_t{work.w_stride} * first_out), work.w_stride);
    const auto start_stage = [&](uint32_t number) {
        const uint32_t k = number * depth;
        __half *x = memory + number % n_stages * stage_halves, *w = x + x_halves;
        if (k < work.n_k) {
            const uint32_t k_left = work.n_k - k, outs_left = work.n_out - first_out;
            x_copies.start(k, work.x.n_tokens - first_token, k_left, x);
            w_copies.start(transposed ? uint64_t{work.w_stride} * k : k, transposed ? k_left : outs_left,
                           transposed ? outs_left : k_left, w);
        }
        commit_copies(); // beyond the last an empty group, so that their number tells which are there
    };
    const auto load = [&](uint32_t number, uint32_t k, Fragments<tiles> &to) {
        const __half *x = memory + number % n_stages * stage_halves;
        load_fragments<tiles, transposed>(x, x + x_halves, k, warp_token, warp_out, to);
    };
    float sum[tiles][8][4] = {};
    Fragments<tiles> even, odd;
    for (uint32_t number = 0; number < n_stages - 1; ++number)
        start_stage(number);
    wait_for_copies<n_stages - 2>();
    __syncthreads();
    load(0, 0, even);
    const uint32_t n = (work.n_k + depth - 1) / depth;
    for (uint32_t number = 0; number < n; ++number) {
        load(number, 16, odd);
        start_stage(number + n_stages - 1);
        multiply_fragments(even, sum);
        wait_for_copies<n_stages - 2>();
        __syncthreads(); // the next stage is there, of all threads; and all have loaded what this one holds
        if (number + 1 < n)
            load(number + 1, 0, even);
        multiply_fragments(odd, sum);
    }
    wait_for_copies<0>();
    write_tile(work, first_token + warp_token, first_out + warp_out, sum);
}

template <int tokens>
void start_gemm(pi_gpu &gpu, const Gemm &work) {
    constexpr size_t shared_bytes = sizeof(__half) * (tokens + outputs) * depth * n_stages;
    const auto kernel = work.transposed ? gemm_kernel<tokens, true> : gemm_kernel<tokens, false>;
    const dim3 grid(ceil_div(work.x.n_tokens, tokens), ceil_div(work.n_out, outputs));
    launch("a matrix product", gpu, kernel, grid, n_threads, shared_bytes, work);
}

// Whether blocks of 64 tokens are done earlier than those of 128, each of which takes as long as 1.7 of them.
bool small_is_faster(const pi_gpu &gpu, const Gemm &work) {
    const auto rounds = [&](unsigned tokens) {
        const uint64_t n = uint64_t{ceil_div(work.x.n_tokens, tokens)} * ceil_div(work.n_out, outputs);
        return ceil_div(n, static_cast<uint64_t>(gpu.n_processors));
    };
    return 10 * rounds(64) < 17 * rounds(128);
}

} // namespace

Halves to_halves(pi_gpu &gpu, const float *x, uint32_t n_tokens, uint32_t n) {
    const uint32_t n_k = ceil_div(n, 32) * 32;
    const uint64_t half_bytes = uint64_t{n_tokens} * n_k * sizeof(__half);
    auto *memory = scratch_of<uint8_t>(gpu, gpu.halves, half_bytes + n_tokens * sizeof(float));
    auto *data = reinterpret_cast<__half *>(memory);
    auto *scale = reinterpret_cast<float *>(memory + half_bytes); // n_k is a multiple of 32
    const auto kernel =
        n % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0 ? to_halves_kernel<4> : to_halves_kernel<1>;
    launch("rounding activations", gpu, kernel, n_tokens, 512, 0, x, n, n_k, data, scale);
    return {data, scale, n_tokens, n_k};
}

void run_gemm(pi_gpu &gpu, const Gemm &work) {
    if (gpu.cublaslt != nullptr && gpu.cublaslt->run(gpu, work))
        return;
    return small_is_faster(gpu, work) ? start_gemm<64>(gpu, work) : start_gemm<128>(gpu, work);
}

} // namespace pi_cuda
