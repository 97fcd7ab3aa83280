// tiles.cpp: matrix products of many tokens. Tiles of weights are dequantised once and multiplied with packed
// panels of tokens: in float, or on a matrix unit in bfloat16.
#include "stream.h"

#include <algorithm>
#include <cstring>

namespace pi {
namespace {

// Output columns of a packed tile: a multiple of every register tile, and of the block where the columns are
// those of a transposed matrix.
constexpr int64_t tile_outputs = 96;
constexpr int64_t wide_tile_outputs = 256;
constexpr int64_t tile_depth = 256;      // inputs of a packed tile
constexpr int64_t max_pass_tokens = 512; // tokens that share one dequantised tile
constexpr int64_t max_panel = 64;        // tokens of a panel

int64_t padded_depth(int64_t n_k) {
    return (n_k + PI_QK - 1) / PI_QK * PI_QK;
}

// Tokens as panels of gemm_panel, packed for gemm_tile or gemm_rounded.
struct Panels {
    const float *floats; // [panel][n_k][gemm_panel], or null
    const pi_bf16
        *rounded; // [panel], each a padded_depth of n_k times gemm_panel in slices of tile_depth, or null
};

// x [n_tokens, n_k], the last panel padded with zeros.
Panels pack_panels(CpuStream &stream, const float *x, int64_t n_tokens, int64_t n_k, bool rounded) {
    const int64_t width = stream.kernels.gemm_panel;
    const int64_t n_panels = (n_tokens + width - 1) / width;
    float *panels = stream.panels.floats(static_cast<uint64_t>(n_panels * padded_depth(n_k) * width));
    auto *halves = reinterpret_cast<pi_bf16 *>(panels);
    const int64_t n_slices = (n_k + tile_depth - 1) / tile_depth;
    stream.pool.run(n_panels * n_slices, [&](int64_t chunk, uint32_t) {
        const int64_t first = chunk / n_slices * width;
        const int64_t k_begin = chunk % n_slices * tile_depth;
        const int64_t k_end = std::min(k_begin + tile_depth, n_k);
        alignas(64) float slice[tile_depth * max_panel];
        float *panel = rounded ? slice : panels + first * n_k + k_begin * width;
        for (int64_t t = 0; t < width; ++t) {
            const float *row = first + t < n_tokens ? x + (first + t) * n_k : nullptr;
            for (int64_t k = k_begin; k < k_end; ++k)
                panel[(k - k_begin) * width + t] = row == nullptr ? 0.0f : row[k];
        }
        if (rounded)
            stream.kernels.round_panel(slice, k_end - k_begin,
                                       halves + first * padded_depth(n_k) + k_begin * width);
    });
    return rounded ? Panels{nullptr, halves} : Panels{panels, nullptr};
}

// One block of output columns of a product: rows of a matrix, or columns of a transposed one.
struct OutputBlock {
    pi_rows rows; // of the range
    const pi_type_kernels *type;
    bool transposed;
    int64_t tile_width; // most output columns of a block of this product
    int64_t begin;      // output columns
    int64_t size;
    int64_t n_k;
    const float *bias; // from `begin` on, or null
    float *out;        // out[token * out_width + column]
    int64_t out_width;
};

void fill_tile(const OutputBlock &block, int64_t k_begin, int64_t k_size, float *tile) {
    const auto *base = static_cast<const uint8_t *>(block.rows.base);
    const int64_t n = block.transposed ? k_size : block.size;
    for (int64_t i = 0; i < n; ++i) {
        if (block.transposed) {
            block.type->dequantize(base + (k_begin + i) * block.rows.row_bytes, block.begin, block.size,
                                   tile + i * block.tile_width);
        } else {
            block.type->dequantize(base + (block.begin + i) * block.rows.row_bytes, k_begin, k_size,
                                   tile + i * tile_depth);
        }
    }
}

// sums [size, stride] of tokens [first, first + n), transposed into the output rows.
void write_block(const OutputBlock &block, const float *sums, int64_t stride, int64_t first, int64_t n) {
    for (int64_t t = 0; t < n; ++t) {
        float *out = block.out + (first + t) * block.out_width + block.begin;
        for (int64_t i = 0; i < block.size; ++i)
            out[i] = sums[i * stride + t] + (block.bias == nullptr ? 0.0f : block.bias[i]);
    }
}

int64_t padded_pass(int64_t n_tokens, int64_t width) {
    return (std::min(n_tokens, max_pass_tokens) + width - 1) / width * width;
}

// Of one thread: weights of a tile, the same rounded, and their products with some tokens.
struct TileScratch {
    float *weights;   // [tile_width, tile_depth] or [tile_depth, tile_width]
    pi_bf16 *rounded; // as many
    float *sums;      // [tile_width, padded_pass]
};

// Adds the slice [k_begin, k_begin + k_size) of the products of tokens [first, first + n).
void multiply_slice(const CpuStream &stream, const OutputBlock &block, const Panels &panels, int64_t first,
                    int64_t n, int64_t k_begin, int64_t k_size, const TileScratch &scratch, int64_t stride) {
    const pi_kernels &kernels = stream.kernels;
    const int64_t width = kernels.gemm_panel;
    const int64_t row_stride = block.transposed ? 1 : tile_depth;
    const int64_t k_stride = block.transposed ? block.tile_width : 1;
    fill_tile(block, k_begin, k_size, scratch.weights);
    if (panels.rounded != nullptr)
        kernels.round_weights(scratch.weights, row_stride, k_stride, block.size, k_size, scratch.rounded);
    for (int64_t t = 0; t < n; t += width) {
        if (panels.rounded != nullptr) {
            const pi_bf16 *panel = panels.rounded + (first + t) * padded_depth(block.n_k) + k_begin * width;
            kernels.gemm_rounded(scratch.rounded, block.size, panel, k_size, scratch.sums + t, stride);
        } else {
            const float *panel = panels.floats + (first + t) * block.n_k + k_begin * width;
            kernels.gemm_tile(scratch.weights, row_stride, k_stride, block.size, panel, k_size,
                              scratch.sums + t, stride);
        }
    }
}

void multiply_block(const CpuStream &stream, const OutputBlock &block, const Panels &panels, int64_t n_tokens,
                    const TileScratch &scratch) {
    const int64_t stride = padded_pass(n_tokens, stream.kernels.gemm_panel);
    for (int64_t first = 0; first < n_tokens; first += stride) {
        const int64_t n = std::min(stride, n_tokens - first);
        std::memset(scratch.sums, 0, static_cast<size_t>(block.size * stride) * sizeof(float));
        for (int64_t k = 0; k < block.n_k; k += tile_depth) {
            const int64_t k_size = std::min(tile_depth, block.n_k - k);
            multiply_slice(stream, block, panels, first, n, k, k_size, scratch, stride);
        }
        write_block(block, scratch.sums, stride, first, n);
    }
}

void multiply_blocks(CpuStream &stream, const std::vector<OutputBlock> &blocks, const Panels &panels,
                     uint32_t n_tokens) {
    const int64_t width = blocks[0].tile_width;
    const int64_t tile_floats = width * tile_depth, rounded_floats = tile_floats / 2;
    const int64_t sum_floats = width * padded_pass(n_tokens, stream.kernels.gemm_panel);
    const int64_t n_floats = tile_floats + rounded_floats + sum_floats;
    float *memory = stream.tiles.floats(static_cast<uint64_t>(n_floats * stream.pool.n_threads()));
    stream.pool.run(static_cast<int64_t>(blocks.size()), [&](int64_t index, uint32_t thread) {
        float *weights = memory + thread * n_floats, *rounded = weights + tile_floats;
        multiply_block(stream, blocks[static_cast<size_t>(index)], panels, n_tokens,
                       {weights, reinterpret_cast<pi_bf16 *>(rounded), rounded + rounded_floats});
    });
}

// Blocks of the rows of a product.
void append_blocks(const CpuStream &stream, const Product &product, std::vector<OutputBlock> *blocks) {
    const auto n_rows = static_cast<int64_t>(product.row_end - product.row_begin);
    for (int64_t begin = 0; begin < n_rows; begin += tile_outputs) {
        blocks->push_back({product.matrix->rows(product.row_begin, product.row_end),
                           &type_kernels(stream, *product.matrix), false, tile_outputs, begin,
                           std::min(tile_outputs, n_rows - begin),
                           static_cast<int64_t>(product.matrix->n_cols),
                           product.bias == nullptr ? nullptr : product.bias + begin, product.out, n_rows});
    }
}

} // namespace

bool rounds_tiles(const CpuStream &stream, const Matrix &matrix) {
    return stream.int8_activations && matrix.type->int8_activations && stream.kernels.gemm_rounded != nullptr;
}

void multiply_tiles(CpuStream &stream, std::span<const Product> products, const float *x, uint32_t n_tokens) {
    const auto n_k = static_cast<int64_t>(products[0].matrix->n_cols);
    const bool rounded = std::all_of(products.begin(), products.end(), [&](const Product &product) {
        return rounds_tiles(stream, *product.matrix);
    });
    std::vector<OutputBlock> blocks;
    for (const Product &product : products)
        append_blocks(stream, product, &blocks);
    multiply_blocks(stream, blocks, pack_panels(stream, x, n_tokens, n_k, rounded), n_tokens);
}

void matmul_transposed(CpuStream &stream, const Matrix &matrix, uint64_t row_begin, uint64_t row_end,
                       const float *h, uint32_t n_tokens, float *out) {
    const auto n_k = static_cast<int64_t>(row_end - row_begin);
    const auto n_cols = static_cast<int64_t>(matrix.n_cols);
    std::vector<OutputBlock> blocks;
    const int64_t width = tile_outputs % matrix.type->block_elements == 0 ? tile_outputs : wide_tile_outputs;
    for (int64_t begin = 0; begin < n_cols; begin += width) {
        blocks.push_back({matrix.rows(row_begin, row_end), &type_kernels(stream, matrix), true, width, begin,
                          std::min(width, n_cols - begin), n_k, nullptr, out, n_cols});
    }
    const Panels panels = pack_panels(stream, h, n_tokens, n_k, rounds_tiles(stream, matrix));
    multiply_blocks(stream, blocks, panels, n_tokens);
}

} // namespace pi
