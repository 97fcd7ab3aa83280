// tiles.cuh: products of a few vectors with rows, 16 rows a warp at a time. Lane (g, t) = (lane / 4, lane %
// 4) reads slices 2 t and 2 t + 1 of eight of rows g and g + 8, a line of 128 bytes of each row: first the
// even ones, then the others. That is how the matrix units take a factor: the bytes of quantised rows are
// multiplied there with the two planes of the vectors' 16-bit integers, rows of floats on their own. The
// warps of a block share the columns: each keeps its part of the vectors in shared memory, passes over all
// rows of the block without waiting for the others, and leaves sums that are added in the end.
#pragma once

#include "mma.cuh"
#include "vectors.cuh"

#include <algorithm>

namespace pi_cuda {

constexpr int tile_warps = 16;
constexpr int tile_threads = tile_warps * warp_size;
constexpr uint32_t rows_of_tile = 16;
constexpr uint32_t slices_of_tile = 8;
constexpr uint32_t row_lanes = 4; // of a row of a tile
constexpr uint32_t most_sums_bytes = 32u << 10;

template <int type>
constexpr uint32_t columns_of_tile = slices_of_tile * Type<type>::width;
// Of a vector: float32, or two planes of bytes; then an int4 for each 32 elements.
template <int type>
constexpr uint32_t tile_units = columns_of_tile<type> / (is_quantised<type> ? 8 : 4);
template <int type>
constexpr uint32_t tile_scales = is_quantised<type> ? columns_of_tile<type> / 32 : 0;

// A block a processor, or four rows a block.
inline unsigned tile_blocks(const pi_gpu &gpu, uint32_t n_rows) {
    return std::min(ceil_div(n_rows, 4), static_cast<unsigned>(gpu.n_processors));
}

// Of a block: what the split that shared_percent asks for has room for, less some fixed arrays.
inline uint32_t most_shared_bytes(const pi_gpu &gpu) {
    return std::min(gpu.shared_bytes, 156u << 10) - 2048;
}

// How a block's warps share columns and rows.
struct Shares {
    uint32_t n_tiles; // of columns
    uint32_t part_bits;
    uint32_t n_parts;    // of these, 2^part_bits: warp w has part w % n_parts
    uint32_t n_groups;   // warps of one part, which take tiles of rows in turns
    uint32_t most_tiles; // of a part
    uint32_t most_rows;  // whose sums have room, a multiple of rows_of_tile

    __device__ __forceinline__ uint32_t begin(uint32_t part) const { return part * n_tiles >> part_bits; }
};

// Of shared memory.
template <int type, int columns>
__host__ __device__ uint32_t tiles_bytes(const Shares &shares) {
    return columns * (tile_warps * shares.most_tiles * (tile_units<type> + tile_scales<type>)*16 +
                      shares.n_parts * shares.most_rows * static_cast<uint32_t>(sizeof(float)));
}

// For blocks of up to n_rows rows; most_rows is 0 where the vectors have no room in this much shared memory.
template <int type, int columns>
Shares shares_of(uint32_t n_cols, uint32_t n_rows, uint32_t shared_bytes) {
    Shares shares{};
    shares.n_tiles = ceil_div(n_cols, columns_of_tile<type>);
    while (2u << shares.part_bits <= std::min<uint32_t>(tile_warps, shares.n_tiles))
        ++shares.part_bits;
    shares.n_parts = 1u << shares.part_bits;
    shares.n_groups = tile_warps / shares.n_parts;
    shares.most_tiles = ceil_div(shares.n_tiles, shares.n_parts);
    const uint32_t taken = tiles_bytes<type, columns>(shares), row_bytes = shares.n_parts * columns * 4;
    const uint32_t room = std::min(shared_bytes - std::min(taken, shared_bytes), most_sums_bytes) / row_bytes;
    shares.most_rows = std::min(room / rows_of_tile, ceil_div(n_rows, rows_of_tile)) * rows_of_tile;
    return shares;
}

// A warp's part of the vectors: column c at units + c * stride.
struct Part {
    uint4 *units;
    uint32_t stride;
    uint32_t n_units; // before the scales

    __device__ __forceinline__ const int4 *scales(int column) const {
        return reinterpret_cast<const int4 *>(units + static_cast<uint32_t>(column) * stride + n_units);
    }
};

// Elements 4 f .. 4 f + 3 as integers q times a scale, q = 256 * high byte + low byte, both signed: units 2 e
// and 2 e + 1 are the high and low bytes of elements 16 e .. 16 e + 15. After them, for each 32 elements, the
// scale and the sums of q over the first 16, the others, and all. Eight lanes hold 32 elements; not `inside`
// ones nothing.
__device__ __forceinline__ void put_planes(const Part &to, int column, uint32_t f, const float4 &x,
                                           bool inside) {
    const Rounded q = rounded_to_planes(x);
    if (!inside)
        return;
    auto *units = to.units + static_cast<uint32_t>(column) * to.stride;
    reinterpret_cast<uint32_t *>(units + f / 4 * 2)[f % 4] = q.high;
    reinterpret_cast<uint32_t *>(units + f / 4 * 2 + 1)[f % 4] = q.low;
    if (f % 8 == 0)
        reinterpret_cast<int4 *>(units + to.n_units)[f / 8] = q.block;
}

// Elements [first, first + n) of the vectors, times the gains, for the warp itself; what lies beyond the end
// is 0. squares: of what the lane met.
template <int type, int columns>
__device__ __forceinline__ void stage_part(const Vectors &vectors, uint32_t first, uint32_t n, const Part &to,
                                           float (&squares)[columns]) {
    constexpr int group = columns < 4 ? columns : 4, at_once = 4 / group; // of loads
    const uint32_t lane = threadIdx.x % warp_size, end = n / 4;
    const uint32_t n_there = min(end, (vectors.n_cols - first) / 4);
    const auto *gain =
        reinterpret_cast<const float4 *>(vectors.gain == nullptr ? nullptr : vectors.gain + first);
#pragma unroll
    for (int begin = 0; begin < columns; begin += group) {
        for (uint32_t at = 0; at < end; at += at_once * warp_size) {
            float4 x[group][at_once], g[at_once] = {};
#pragma unroll
            for (int j = 0; j < at_once; ++j) {
                const uint32_t f = min(at + j * warp_size + lane, n_there - 1);
#pragma unroll
                for (int c = 0; c < group; ++c) {
                    const uint32_t column = min(static_cast<uint32_t>(begin + c), vectors.n_columns - 1);
                    x[c][j] = __ldcg(reinterpret_cast<const float4 *>(
                                         vectors.x + uint64_t{vectors.stride} * column + first) +
                                     f);
                }
                if (gain != nullptr)
                    g[j] = __ldg(gain + f);
            }
#pragma unroll
            for (int j = 0; j < at_once; ++j) {
                const uint32_t f = at + j * warp_size + lane;
#pragma unroll
                for (int c = 0; c < group; ++c) {
                    float4 &v = x[c][j];
                    if (f >= n_there)
                        v = {0, 0, 0, 0};
                    if (gain != nullptr) {
                        squares[begin + c] += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                        v = {v.x * g[j].x, v.y * g[j].y, v.z * g[j].z, v.w * g[j].w};
                    }
                    if constexpr (is_quantised<type>)
                        put_planes(to, begin + c, f, v, f < end);
                    else if (f < end)
                        reinterpret_cast<float4 *>(to.units +
                                                   static_cast<uint32_t>(begin + c) * to.stride)[f] = v;
                }
            }
        }
    }
}

// sum[r][c] += the lane's slice of row g + 8 r . the same of vector c; slices count from the part's first
template <int type, int columns>
__device__ __forceinline__ void add_float_slice(const typename Type<type>::Packed (&packed)[2],
                                                const Part &of, uint32_t slice, float (&sum)[2][columns]) {
    constexpr int width = Type<type>::width;
    float weight[2][width];
    Type<type>::floats(packed[0], weight[0]);
    Type<type>::floats(packed[1], weight[1]);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
        const uint4 *units = of.units + c * of.stride + slice * (width / 4);
#pragma unroll
        for (int j = 0; j < width / 4; ++j) {
            const float4 x = reinterpret_cast<const float4 *>(units)[j];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float *w = weight[r] + 4 * j;
                sum[r][c] += w[0] * x.x + w[1] * x.y + w[2] * x.z + w[3] * x.w;
            }
        }
    }
}

// The planes of the lane's slice of a vector: the second factor of a product on the matrix units has a column
// for each plane of each of the four lanes' slices, and in column 2 t + plane only what meets lane t's is not
// 0. So a sum of products over the words of four slices is, in lane (g, t), that of its own slice, high and
// low.
template <int type>
__device__ __forceinline__ void slice_planes(const uint4 *units, uint32_t slice,
                                             uint32_t (&words)[Type<type>::width / 4]) {
    constexpr uint32_t per_slice = Type<type>::width / 16;
    const uint32_t t = threadIdx.x % row_lanes, column = threadIdx.x % warp_size / row_lanes;
#pragma unroll
    for (uint32_t i = 0; i < per_slice; ++i) {
        uint4 v = {0, 0, 0, 0};
        if (column / 2 == t)
            v = units[(slice * per_slice + i) * 2 + column % 2];
        words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
    }
}

template <int type, int columns>
__device__ __forceinline__ void add_byte_slice(const typename Type<type>::Packed (&packed)[2], const Part &of,
                                               uint32_t slice, float (&sum)[2][columns]) {
    using T = Type<type>;
    constexpr int n_words = T::width / 4, of_group = n_words / T::groups;
    uint32_t words[2][n_words];
    T::bytes(packed[0], words[0]);
    T::bytes(packed[1], words[1]);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
        uint32_t x[n_words];
        slice_planes<type>(of.units + c * of.stride, slice, x);
        const int4 block = of.scales(c)[slice / (32 / T::width)];
        const float unit = __uint_as_float(static_cast<uint32_t>(block.x));
#pragma unroll
        for (int group = 0; group < T::groups; ++group) {
            int dot[4] = {}; // high and low of row g, then of row g + 8
#pragma unroll
            for (int i = group * of_group; i < (group + 1) * of_group; i += 2) {
                const uint32_t a[4] = {words[0][i], words[1][i], words[0][i + 1], words[1][i + 1]};
                multiply_add(dot, a, x[i], x[i + 1]);
            }
            static_assert(T::width == 32 ||
                          (T::bias == 0 && !T::has_minimum)); // else the sum of 16 is needed
            const int of_x = T::groups == 1 ? block.w : group == 0 ? block.y : block.z;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float2 scales = T::scales(packed[r], group);
                const int product = 256 * dot[2 * r] + dot[2 * r + 1] - T::bias * of_x;
                sum[r][c] += scales.x * (unit * static_cast<float>(product));
                if constexpr (T::has_minimum)
                    sum[r][c] += scales.y * (unit * static_cast<float>(of_x));
            }
        }
    }
}

// A block's products: begin() has the first tiles of rows on their way, stage() the vectors, and pass()
// leaves what total() adds. rows_of(tile) are rows g and g + 8 of a tile, and any for those beyond the last.
template <int type, int columns>
struct Tiles {
    using Packed = typename Type<type>::Packed;
    // Tiles; of many vectors one, for want of registers.
    static constexpr int depth = columns < 4 ? slices_ahead<type> / 2 : 1;

    const Vectors &vectors;
    const Shares &shares;
    Part own;
    float *sums;        // [n_parts, most_rows, columns] shared
    float *square_sums; // [columns, tile_warps] shared
    uint32_t part, group;
    uint32_t begin_tile, end_tile; // of columns
    Packed packed[depth][2][2];    // even and odd slices of both rows
    RowPair rows;                  // to be loaded from next, and where
    uint32_t row_tile, at_tile;

    __device__ __forceinline__ Tiles(const Vectors &of, const Shares &shared_as, uint4 *shared,
                                     float *squares)
        : vectors(of), shares(shared_as), square_sums(squares) {
        const uint32_t warp = threadIdx.x / warp_size;
        part = warp & (shares.n_parts - 1);
        group = warp >> shares.part_bits;
        begin_tile = shares.begin(part);
        end_tile = shares.begin(part + 1);
        const uint32_t n_units = shares.most_tiles * tile_units<type>;
        const uint32_t stride = n_units + shares.most_tiles * tile_scales<type>;
        own = {shared + warp * columns * stride, stride, n_units};
        sums = reinterpret_cast<float *>(shared + tile_warps * columns * stride);
    }

    template <typename RowsOf>
    __device__ __forceinline__ void load(int d, const RowsOf &rows_of) {
        const uint32_t before = vectors.first / Type<type>::width,
                       last = before + vectors.n_cols / Type<type>::width - 1,
                       slice = before + slices_of_tile * at_tile + threadIdx.x % row_lanes * 2;
#pragma unroll
        for (int r = 0; r < 2; ++r)
            load_pair<type>(rows.row[r], slice, last, packed[d][0][r], packed[d][1][r]);
        if (++at_tile == end_tile) {
            at_tile = begin_tile;
            row_tile += shares.n_groups;
            rows = rows_of(row_tile);
        }
    }

    template <typename RowsOf>
    __device__ __forceinline__ void begin(const RowsOf &rows_of, uint32_t first) {
        row_tile = first + group;
        at_tile = begin_tile;
        rows = rows_of(row_tile);
#pragma unroll
        for (int d = 0; d < depth; ++d)
            load(d, rows_of);
    }

    __device__ __forceinline__ void stage() {
        float squares[columns] = {};
        const uint32_t first = begin_tile * columns_of_tile<type>;
        stage_part<type, columns>(vectors, first, end_tile * columns_of_tile<type> - first, own, squares);
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            if (vectors.gain != nullptr)
                squares[c] = warp_sum(squares[c]);
            if (threadIdx.x % warp_size == 0)
                square_sums[c * tile_warps + threadIdx.x / warp_size] = squares[c];
        }
        __syncwarp();
    }

    // The sums of the four lanes that have parts of rows g and g + 8, of tile `tile` of those that are
    // summed.
    __device__ __forceinline__ void leave(const float (&sum)[2][columns], uint32_t tile, bool inside) {
        const uint32_t lane = threadIdx.x % warp_size;
        const bool odd = lane % 2 != 0;
        const uint32_t row = part * shares.most_rows + tile * rows_of_tile + lane / 4 + (odd ? 8 : 0);
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            float of_row = odd ? sum[1][c] : sum[0][c];
            of_row += __shfl_xor_sync(0xffffffffu, odd ? sum[0][c] : sum[1][c], 1);
            of_row += __shfl_xor_sync(0xffffffffu, of_row, 2);
            if (lane % 4 < 2 && inside)
                sums[row * columns + c] = of_row;
        }
    }

    // Tiles [first, last) of rows, which have room for their sums; begin() came before.
    template <typename RowsOf>
    __device__ __forceinline__ void pass(const RowsOf &rows_of, uint32_t first, uint32_t last) {
        float sum[2][columns] = {};
        uint32_t tile = begin_tile, of = first + group;
        while (of < last) {
#pragma unroll
            for (int d = 0; d < depth; ++d) {
#pragma unroll
                for (uint32_t odd = 0; odd < 2; ++odd) {
                    const uint32_t slice =
                        slices_of_tile * (tile - begin_tile) + threadIdx.x % row_lanes * 2 + odd;
                    if constexpr (is_quantised<type>)
                        add_byte_slice<type, columns>(packed[d][odd], own, slice, sum);
                    else
                        add_float_slice<type, columns>(packed[d][odd], own, slice, sum);
                }
                load(d, rows_of);
                if (++tile == end_tile) {
                    tile = begin_tile;
                    leave(sum, of - first, of < last);
                    of += shares.n_groups;
#pragma unroll
                    for (int c = 0; c < columns; ++c)
                        sum[0][c] = sum[1][c] = 0;
                }
            }
        }
        __syncthreads();
    }

    // Passes over n_tiles tiles; use(first, last) after each finds the totals of what is between.
    template <typename RowsOf, typename Use>
    __device__ __forceinline__ void multiply(const RowsOf &rows_of, uint32_t n_tiles, const Use &use) {
        const uint32_t at_once = shares.most_rows / rows_of_tile;
        for (uint32_t first = 0; first < n_tiles; first += at_once) {
            if (first > 0) {
                __syncthreads(); // the totals have been used
                begin(rows_of, first);
            }
            const uint32_t last = min(first + at_once, n_tiles);
            pass(rows_of, first, last);
            use(first, last);
        }
    }

    // Of row `row` of those of the last pass, for column c.
    __device__ __forceinline__ float total(uint32_t row, uint32_t c) const {
        float value = 0, squares = 0;
#pragma unroll
        for (uint32_t p = 0; p < tile_warps; ++p) {
            value += p < shares.n_parts ? sums[(p * shares.most_rows + row) * columns + c] : 0.0f;
            squares += p < shares.n_parts ? square_sums[c * tile_warps + p] : 0.0f;
        }
        if (vectors.gain == nullptr)
            return value;
        return value / sqrtf(squares / static_cast<float>(vectors.n_cols) + vectors.eps);
    }
};

} // namespace pi_cuda
