// vectors.cuh: a few vectors in shared memory, and products of slices of two rows with them. Vectors that
// meet quantised rows are rounded to 16 bits with a scale for each 32 elements, so that products are sums of
// integers; others stay float32. A vector that is to be normalised is multiplied by the gains here, and what
// comes out of it by 1 / rms in the end, so that no launch is needed before.
#pragma once

#include "k_quants.cuh"

#include <algorithm>

namespace pi_cuda {

constexpr int gemv_warps = 8;
constexpr int gemv_threads = gemv_warps * warp_size;
constexpr int gemv_rows = 2; // of a warp at a time
constexpr uint32_t gemv_max_columns = 8;

struct Vectors {
    uint32_t n_cols;
    uint32_t n_columns; // at most the kernel's
    const float *x;     // [n_columns, n_cols]
    const float *gain;  // [n_cols] or null: x as it is
    float eps;
    uint32_t first = 0;  // of the rows' columns, where the vectors begin
    uint32_t stride = 0; // elements from one to the next
};

// Bytes of 32 elements: their high bytes and low bytes, 16 by 16, and an int4; or floats.
template <int type>
constexpr uint32_t bytes_of_32 = is_quantised<type> ? 80 : 128;
constexpr uint32_t most_vector_bytes = 64u << 10;

// Elements that are in shared memory at a time, of each of some vectors.
template <int type, int columns>
constexpr uint32_t vector_chunk = most_vector_bytes / bytes_of_32<type> / columns / 64 * 64 * 32;

// Blocks of 32 elements of a vector that have room there: an even number, as 16 byte units are swizzled in
// eights.
template <int type, int columns>
__host__ __device__ __forceinline__ uint32_t vector_blocks(uint32_t n_cols) {
    const uint32_t n = n_cols < vector_chunk<type, columns> ? n_cols : vector_chunk<type, columns>;
    return (n / 32 + 1) / 2 * 2;
}

template <int type, int columns>
__host__ __device__ __forceinline__ uint32_t vectors_bytes(uint32_t n_cols) {
    return columns * vector_blocks<type, columns>(n_cols) * bytes_of_32<type>;
}

// About two blocks a processor, or a pair of rows a warp.
inline unsigned gemv_blocks(const pi_gpu &gpu, uint32_t n_pairs) {
    return std::min(ceil_div(n_pairs, gemv_warps), 2u * static_cast<unsigned>(gpu.n_processors));
}

// The vectors of a block in shared memory: column c at units + c * stride; of a quantised one the scales
// after the bytes.
struct Staged {
    uint4 *units;
    uint32_t stride;
    uint32_t n_units; // before the scales
};

// Where 16 bytes are kept: lanes that read 1, 2 or 4 neighbours each find them in different banks.
__device__ __forceinline__ uint32_t swizzled(uint32_t unit) {
    return unit ^ (unit >> 3 & 7u);
}

template <int type, int columns>
__device__ __forceinline__ Staged staged_vectors(uint4 *shared, uint32_t n_cols) {
    const uint32_t blocks = vector_blocks<type, columns>(n_cols);
    return {shared, blocks * (bytes_of_32<type> / 16), blocks * 4};
}

constexpr float most_rounded = 32512.0f; // 127 * 256: the high byte, rounded to nearest, is one

__device__ __forceinline__ uint32_t four_bytes(int a, int b, int c, int d) {
    return (static_cast<uint32_t>(a) & 0xffu) | (static_cast<uint32_t>(b) & 0xffu) << 8 |
           (static_cast<uint32_t>(c) & 0xffu) << 16 | static_cast<uint32_t>(d) << 24;
}

// Four elements of the 32 that eight lanes have as integers q times a scale, q = 256 * high byte + low byte,
// both signed; for all 32 the scale and the sums of q over the first 16, the others, and all.
struct Rounded {
    uint32_t high, low;
    int4 block;
};

__device__ __forceinline__ Rounded rounded_to_planes(const float4 &x) {
    // As integers NaN is above infinity, and becomes the scale.
    uint32_t peak_bits = max(max(__float_as_uint(fabsf(x.x)), __float_as_uint(fabsf(x.y))),
                             max(__float_as_uint(fabsf(x.z)), __float_as_uint(fabsf(x.w))));
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2)
        peak_bits = max(peak_bits, __shfl_xor_sync(0xffffffffu, peak_bits, lanes));
    const float peak = __uint_as_float(peak_bits);
    // Below, 1 / peak may overflow. A last bit of the quotient is nothing beside the rounding.
    const float inverse = peak > 1e-30f ? __fdividef(most_rounded, peak) : 0.0f;
    const int a = __float2int_rn(x.x * inverse), b = __float2int_rn(x.y * inverse),
              c = __float2int_rn(x.z * inverse), d = __float2int_rn(x.w * inverse);
    int sum = a + b + c + d;
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int other = __shfl_xor_sync(0xffffffffu, sum, 4);
    return {four_bytes((a + 128) >> 8, (b + 128) >> 8, (c + 128) >> 8, (d + 128) >> 8),
            four_bytes(a, b, c, d),
            {static_cast<int>(__float_as_uint(peak * (1.0f / most_rounded))), sum, other, sum + other}};
}

// Elements 4 f .. 4 f + 3: units 2 e and 2 e + 1 are the high and low bytes of elements 16 e .. 16 e + 15,
// after them what there is of each 32. Eight lanes hold 32 elements; not `inside` ones nothing.
__device__ __forceinline__ void put_rounded(const Staged &to, uint32_t column, uint32_t f, const float4 &x,
                                            bool inside) {
    const Rounded q = rounded_to_planes(x);
    if (!inside)
        return;
    auto *units = to.units + column * to.stride;
    const uint32_t unit = f / 4 * 2, word = f % 4;
    reinterpret_cast<uint32_t *>(units + swizzled(unit))[word] = q.high;
    reinterpret_cast<uint32_t *>(units + swizzled(unit + 1))[word] = q.low;
    if (f % 8 == 0)
        reinterpret_cast<int4 *>(units + to.n_units)[f / 8] = q.block;
}

// Elements [begin, begin + n) of the vectors, times the gains; squares: of what the thread met.
template <int type, int columns>
__device__ __forceinline__ void stage_vectors(const Vectors &vectors, uint32_t begin, uint32_t n,
                                              const Staged &to, float (&squares)[columns]) {
    constexpr uint32_t at_once = 4; // loads of a thread
    const auto *gain =
        reinterpret_cast<const float4 *>(vectors.gain == nullptr ? nullptr : vectors.gain + begin);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
        const uint32_t column = min(static_cast<uint32_t>(c), vectors.n_columns - 1);
        const auto *from =
            reinterpret_cast<const float4 *>(vectors.x + uint64_t{vectors.n_cols} * column + begin);
        const uint32_t lane = threadIdx.x % warp_size, end = n / 4;
        for (uint32_t first = threadIdx.x - lane; first < end; first += at_once * blockDim.x) {
            float4 x[at_once], g[at_once] = {};
#pragma unroll
            for (uint32_t j = 0; j < at_once; ++j)
                x[j] = __ldcg(from + min(first + j * blockDim.x + lane, end - 1));
            if (gain != nullptr) {
#pragma unroll
                for (uint32_t j = 0; j < at_once; ++j)
                    g[j] = gain[min(first + j * blockDim.x + lane, end - 1)];
            }
#pragma unroll
            for (uint32_t j = 0; j < at_once; ++j) {
                const uint32_t f = first + j * blockDim.x + lane;
                const bool inside = f < end;
                if (!inside)
                    x[j] = {0, 0, 0, 0};
                if (gain != nullptr) {
                    squares[c] += x[j].x * x[j].x + x[j].y * x[j].y + x[j].z * x[j].z + x[j].w * x[j].w;
                    x[j] = {x[j].x * g[j].x, x[j].y * g[j].y, x[j].z * g[j].z, x[j].w * g[j].w};
                }
                if constexpr (is_quantised<type>)
                    put_rounded(to, static_cast<uint32_t>(c), f, x[j], inside);
                else if (inside)
                    reinterpret_cast<float4 *>(to.units + c * to.stride)[swizzled(f)] = x[j];
            }
        }
    }
}

// 1 / rms of a vector of which every thread has met a part; 1 without gains.
__device__ __forceinline__ float norm_scale(const Vectors &vectors, float squares, float *shared) {
    if (vectors.gain == nullptr)
        return 1.0f;
    return 1.0f / sqrtf(block_sum(squares, shared) / static_cast<float>(vectors.n_cols) + vectors.eps);
}

// sum[r][c] += slice of row r . the same slice of vector c; the slice's number counts from the chunk's begin.
template <int type, int columns>
__device__ __forceinline__ void add_rounded(const typename Type<type>::Packed (&packed)[gemv_rows],
                                            const Staged &of, uint32_t slice, float (*sum)[columns]) {
    using T = Type<type>;
    constexpr int runs = T::width / 16; // of 16 elements
    uint32_t words[gemv_rows][T::width / 4];
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r)
        T::bytes(packed[r], words[r]);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
        const uint4 *x = of.units + c * of.stride;
        const int4 block = reinterpret_cast<const int4 *>(x + of.n_units)[slice * T::width / 32];
        int high[gemv_rows][T::groups] = {}, low[gemv_rows][T::groups] = {};
#pragma unroll
        for (int run = 0; run < runs; ++run) {
            const uint4 h = x[swizzled(2 * (slice * runs + run))],
                        l = x[swizzled(2 * (slice * runs + run) + 1)];
            const uint32_t highs[4] = {h.x, h.y, h.z, h.w}, lows[4] = {l.x, l.y, l.z, l.w};
            constexpr int per_group = runs / T::groups;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
#pragma unroll
                for (int r = 0; r < gemv_rows; ++r) {
                    const int q = static_cast<int>(words[r][4 * run + w]), g = run / per_group;
                    high[r][g] = __dp4a(q, static_cast<int>(highs[w]), high[r][g]);
                    low[r][g] = __dp4a(q, static_cast<int>(lows[w]), low[r][g]);
                }
            }
        }
        const float unit = __uint_as_float(static_cast<uint32_t>(block.x));
#pragma unroll
        for (int g = 0; g < T::groups; ++g) {
            const int of_x = T::groups == 1 ? block.w : g == 0 ? block.y : block.z;
#pragma unroll
            for (int r = 0; r < gemv_rows; ++r) {
                const float2 scales = T::scales(packed[r], g);
                const int dot = 256 * high[r][g] + low[r][g] - T::bias * of_x;
                sum[r][c] += scales.x * (unit * static_cast<float>(dot));
                if constexpr (T::has_minimum)
                    sum[r][c] += scales.y * (unit * static_cast<float>(of_x));
            }
        }
    }
}

template <int type, int columns>
__device__ __forceinline__ void add_floats(const typename Type<type>::Packed (&packed)[gemv_rows],
                                           const Staged &of, uint32_t slice, float (*sum)[columns]) {
    constexpr int width = Type<type>::width;
    float weight[gemv_rows][width];
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r)
        Type<type>::floats(packed[r], weight[r]);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
#pragma unroll
        for (int j = 0; j < width / 4; ++j) {
            const float4 x =
                reinterpret_cast<const float4 *>(of.units + c * of.stride)[swizzled(slice * (width / 4) + j)];
#pragma unroll
            for (int r = 0; r < gemv_rows; ++r) {
                const float *w = weight[r] + 4 * j;
                sum[r][c] += w[0] * x.x + w[1] * x.y + w[2] * x.z + w[3] * x.w;
            }
        }
    }
}

// The vectors of a block, in shared memory chunk by chunk; stage() is for all of its threads.
template <int type, int columns>
struct BlockVectors {
    const Vectors &of;
    Staged staged;
    float *warp_sums;          // [warp_size] shared
    float scale[columns] = {}; // of the products, once the last chunk was staged
    float squares[columns] = {};
    bool ready = false; // all of it is there

    static constexpr uint32_t chunk = vector_chunk<type, columns>;

    __device__ BlockVectors(const Vectors &vectors, uint4 *shared, float *sums)
        : of(vectors), staged(staged_vectors<type, columns>(shared, vectors.n_cols)), warp_sums(sums) {}

    __device__ __forceinline__ void stage(uint32_t begin) {
        if (ready)
            return;
        const uint32_t n = min(chunk, of.n_cols - begin);
#pragma unroll
        for (int c = 0; c < columns; ++c)
            squares[c] = begin == 0 ? 0.0f : squares[c];
        __syncthreads();
        stage_vectors<type, columns>(of, begin, n, staged, squares);
        __syncthreads();
        if (begin + n < of.n_cols)
            return;
#pragma unroll
        for (int c = 0; c < columns; ++c)
            scale[c] = norm_scale(of, squares[c], warp_sums);
        ready = n == of.n_cols;
    }
};

// Two rows, and what a warp has on its way of them: a lane `depth` slices of each.
struct RowPair {
    RowView row[gemv_rows];
};

// Part by part: a choice between structures would go through memory.
__device__ __forceinline__ RowPair choose(bool first, const RowPair &a, const RowPair &b) {
    RowPair out;
#pragma unroll
    for (int r = 0; r < gemv_rows; ++r)
        out.row[r] = {first ? a.row[r].base : b.row[r].base, a.row[r].n_blocks};
    return out;
}

template <int type>
struct Ahead {
    using Packed = typename Type<type>::Packed;
    static constexpr uint32_t depth = slices_ahead<type>;
    static constexpr uint32_t slices = depth * warp_size; // of the warp
    Packed packed[depth][gemv_rows];

    // The last slice before `end` in place of those beyond it. Without a branch, so that each load is waited
    // for alone: loads of different branches are counted together.
    __device__ __forceinline__ void load(uint32_t d, const RowPair &rows, uint32_t slice, uint32_t end) {
#pragma unroll
        for (int r = 0; r < gemv_rows; ++r)
            packed[d][r] = Type<type>::load(rows.row[r], min(slice, end - 1));
    }
    __device__ __forceinline__ void begin(const RowPair &rows, uint32_t end) {
#pragma unroll
        for (uint32_t d = 0; d < depth; ++d)
            load(d, rows, d * warp_size + threadIdx.x % warp_size, end);
    }
};

// sum += slices [begin, end) of two rows . a chunk of the vectors. The first of them are on their way, and in
// the end the first of [next_begin, next_end) of the next rows.
template <int type, int columns>
__device__ __forceinline__ void
multiply_range(Ahead<type> &ahead, const RowPair &rows, uint32_t begin, uint32_t end, const RowPair &next,
               uint32_t next_begin, uint32_t next_end, const Staged &vectors, float (*sum)[columns]) {
    const uint32_t lane = threadIdx.x % warp_size;
    for (uint32_t at = begin; at < end; at += Ahead<type>::slices) {
        const bool more = at + Ahead<type>::slices < end;
        const RowPair from = choose(more, rows, next);
        const uint32_t from_begin = more ? at + Ahead<type>::slices : next_begin;
        const uint32_t from_end = more ? end : next_end;
#pragma unroll
        for (uint32_t d = 0; d < Ahead<type>::depth; ++d) {
            const uint32_t slice = at + d * warp_size + lane, of_chunk = min(slice, end - 1) - begin;
            float part[gemv_rows][columns] = {};
            if constexpr (is_quantised<type>)
                add_rounded<type, columns>(ahead.packed[d], vectors, of_chunk, part);
            else
                add_floats<type, columns>(ahead.packed[d], vectors, of_chunk, part);
#pragma unroll
            for (int r = 0; r < gemv_rows; ++r) {
#pragma unroll
                for (int c = 0; c < columns; ++c)
                    sum[r][c] += slice < end ? part[r][c] : 0.0f;
            }
            ahead.load(d, from, from_begin + d * warp_size + lane, from_end);
        }
    }
}

// Pairs of rows that the warps of a block take in turns: pair `begin` + a warp's number, then `stride` on.
struct Pairs {
    uint32_t begin;
    uint32_t stride;
    uint32_t n; // one beyond the last, of all blocks
};

// A warp's first pair on its way, or a slice of the last where it has none. rows_of(pair) are its RowPair.
template <int type, int columns, typename RowsOf>
__device__ __forceinline__ void begin_pairs(Ahead<type> &ahead, const Pairs &pairs, uint32_t n_cols,
                                            const RowsOf &rows_of) {
    const uint32_t pair = pairs.begin + threadIdx.x / warp_size;
    const uint32_t end = min(n_cols, vector_chunk<type, columns>) / Type<type>::width;
    ahead.begin(rows_of(min(pair, pairs.n - 1)), pair < pairs.n ? end : 1);
}

// Calls finish(pair, sum) for the warp's pairs, sum[row][column] in all lanes; begin_pairs() came before.
template <int type, int columns, typename RowsOf, typename Finish>
__device__ __forceinline__ void multiply_pairs(Ahead<type> &ahead, const Pairs &pairs,
                                               BlockVectors<type, columns> &vectors, const RowsOf &rows_of,
                                               const Finish &finish) {
    constexpr uint32_t width = Type<type>::width, chunk = vector_chunk<type, columns> / width;
    const uint32_t n_slices = vectors.of.n_cols / width;
    uint32_t pair = pairs.begin + threadIdx.x / warp_size;
    RowPair rows = rows_of(min(pair, pairs.n - 1));
    for (uint32_t first = pairs.begin; first < pairs.n; first += pairs.stride, pair += pairs.stride) {
        const bool mine = pair < pairs.n, more = pair + pairs.stride < pairs.n;
        const RowPair next = rows_of(more ? pair + pairs.stride : pairs.n - 1);
        float sum[gemv_rows][columns] = {};
        for (uint32_t begin = 0; begin < n_slices; begin += chunk) {
            const uint32_t end = min(begin + chunk, n_slices);
            const bool last = end == n_slices;
            const uint32_t next_begin = last ? 0 : end;
            const uint32_t next_end =
                !last || more ? min(next_begin + chunk, n_slices) : 1; // a slice as good as none
            vectors.stage(begin * width);
            if (mine)
                multiply_range<type, columns>(ahead, rows, begin, end, choose(last, next, rows), next_begin,
                                              next_end, vectors.staged, sum);
        }
#pragma unroll
        for (int r = 0; r < gemv_rows; ++r) {
#pragma unroll
            for (int c = 0; c < columns; ++c)
                sum[r][c] = warp_sum(sum[r][c]) * vectors.scale[c];
        }
        if (mine)
            finish(pair, sum);
        rows = next;
    }
}

} // namespace pi_cuda
