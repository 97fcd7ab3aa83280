// matmul.cpp: matrix products on the CPU. Few tokens: rows of weights against vectors, int8 or float. Many
// tokens: weight tiles dequantised once and multiplied with packed panels of tokens.
#include "stream.h"

#include <algorithm>
#include <cstring>
#include <new>

namespace pi {
namespace {

// Every chunk starts cold (kernels/simd/prefetch.inl), so they are large where the weights are many; several
// for a thread even out cores of different speed.
constexpr int64_t min_chunk_bytes = 16 * 1024;
constexpr int64_t max_chunk_bytes = 1024 * 1024;
constexpr int64_t chunks_per_thread = 4;
constexpr int64_t min_chunk_rows = 8;
// Output columns of a packed tile: a multiple of every register tile, and of the block where the columns are
// those of a transposed matrix.
constexpr int64_t tile_outputs = 96;
constexpr int64_t wide_tile_outputs = 256;
constexpr int64_t tile_depth = 256;      // inputs of a packed tile
constexpr int64_t max_pass_tokens = 512; // tokens that share one dequantised tile
constexpr int64_t int8_chunk_rows = 32;  // of many tokens' int8 product: one tile of the kernel
constexpr uint32_t max_row_tokens = 16;

struct RowChunk {
    const Product *product;
    int64_t begin; // rows within the product's range
    int64_t end;
};

const pi_type_kernels &type_kernels(const CpuStream &stream, const Matrix &matrix) {
    return stream.kernels.type[matrix.type->kernel_index];
}

// Whether a step multiplies row by row: always where the tokens are few, and up to the width of a float tile,
// most of which would stay empty, where there is no int8 product of many tokens.
bool by_rows(const CpuStream &stream, const Matrix &matrix, uint32_t n_tokens) {
    const bool many_int8 = stream.int8_activations && matrix.type->int8_activations &&
                           type_kernels(stream, matrix).many_q8 != nullptr;
    return n_tokens <= (many_int8 ? gemv_tokens : max_row_tokens);
}

// rows_each of a product: the rows of its chunks.
template <typename RowsEach>
std::vector<RowChunk> split_rows(std::span<const Product> products, RowsEach rows_each) {
    std::vector<RowChunk> chunks;
    for (const Product &product : products) {
        const auto n_rows = static_cast<int64_t>(product.row_end - product.row_begin);
        const int64_t step = rows_each(product);
        for (int64_t begin = 0; begin < n_rows; begin += step)
            chunks.push_back({&product, begin, std::min(begin + step, n_rows)});
    }
    return chunks;
}

int64_t bytes_of(std::span<const Product> products) {
    uint64_t n_bytes = 0;
    for (const Product &product : products)
        n_bytes += (product.row_end - product.row_begin) * product.matrix->row_bytes;
    return static_cast<int64_t>(n_bytes);
}

pi_rows chunk_rows(const RowChunk &chunk) {
    const uint64_t base = chunk.product->row_begin;
    return chunk.product->matrix->rows(base + static_cast<uint64_t>(chunk.begin),
                                       base + static_cast<uint64_t>(chunk.end));
}

void multiply_rows(const CpuStream &stream, const RowChunk &chunk, const float *x, const uint32_t *positions,
                   uint32_t n_tokens) {
    const Product &product = *chunk.product;
    const pi_type_kernels &kernels = type_kernels(stream, *product.matrix);
    const pi_rows rows = chunk_rows(chunk);
    const bool int8 = uses_int8(stream, *product.matrix, n_tokens);
    const uint64_t width = product.row_end - product.row_begin;
    for (uint32_t token = 0; token < n_tokens; ++token) {
        float *out = product.out + token * width + chunk.begin;
        if (int8 && !is_precise(positions, token)) {
            kernels.dot_q8(&rows, &stream.quantised.tokens[token], out);
        } else {
            kernels.dot_f32(&rows, x + token * product.matrix->n_cols, out);
        }
        if (product.bias != nullptr)
            stream.kernels.add(product.bias + chunk.begin, chunk.end - chunk.begin, out);
    }
}

void multiply_by_rows(CpuStream &stream, std::span<const Product> products, const float *x,
                      const uint32_t *positions, uint32_t n_tokens) {
    const bool int8 = std::any_of(products.begin(), products.end(), [&](const Product &product) {
        return uses_int8(stream, *product.matrix, n_tokens);
    });
    if (int8)
        quantise_input(stream, x, n_tokens, products[0].matrix->n_cols);
    const int64_t n_bytes = bytes_of(products);
    const std::vector<RowChunk> chunks = split_rows(products, [&](const Product &product) {
        const auto row_bytes = static_cast<int64_t>(product.matrix->row_bytes);
        const int64_t n_rows = rows_per_chunk(stream, n_bytes, row_bytes);
        return n_tokens == 1 ? n_rows : std::clamp(shared_bytes / row_bytes, min_chunk_rows, n_rows);
    });
    stream.pool.run(static_cast<int64_t>(chunks.size()), [&](int64_t index, uint32_t) {
        multiply_rows(stream, chunks[static_cast<size_t>(index)], x, positions, n_tokens);
    });
}

// x [n_tokens, n_k] as panels [panel][n_k][gemm_panel], the last one padded with zeros.
const float *pack_panels(CpuStream &stream, const float *x, int64_t n_tokens, int64_t n_k) {
    const int64_t width = stream.kernels.gemm_panel;
    const int64_t n_panels = (n_tokens + width - 1) / width;
    float *panels = stream.panels.floats(static_cast<uint64_t>(n_panels * n_k * width));
    const int64_t n_slices = (n_k + tile_depth - 1) / tile_depth;
    stream.pool.run(n_panels * n_slices, [&](int64_t chunk, uint32_t) {
        const int64_t first = chunk / n_slices * width;
        const int64_t k_begin = chunk % n_slices * tile_depth;
        const int64_t k_end = std::min(k_begin + tile_depth, n_k);
        float *panel = panels + first * n_k;
        for (int64_t t = 0; t < width; ++t) {
            const float *row = first + t < n_tokens ? x + (first + t) * n_k : nullptr;
            for (int64_t k = k_begin; k < k_end; ++k)
                panel[k * width + t] = row == nullptr ? 0.0f : row[k];
        }
    });
    return panels;
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

void multiply_block(const CpuStream &stream, const OutputBlock &block, const float *panels, int64_t n_tokens,
                    float *tile, float *sums) {
    const int64_t width = stream.kernels.gemm_panel;
    const int64_t stride = padded_pass(n_tokens, width);
    for (int64_t first = 0; first < n_tokens; first += stride) {
        const int64_t n = std::min(stride, n_tokens - first);
        std::memset(sums, 0, static_cast<size_t>(block.size * stride) * sizeof(float));
        for (int64_t k = 0; k < block.n_k; k += tile_depth) {
            const int64_t k_size = std::min(tile_depth, block.n_k - k);
            fill_tile(block, k, k_size, tile);
            for (int64_t t = 0; t < n; t += width) {
                const float *panel = panels + ((first + t) * block.n_k + k * width);
                stream.kernels.gemm_tile(tile, block.transposed ? 1 : tile_depth,
                                         block.transposed ? block.tile_width : 1, block.size, panel, k_size,
                                         sums + t, stride);
            }
        }
        write_block(block, sums, stride, first, n);
    }
}

void multiply_blocks(CpuStream &stream, const std::vector<OutputBlock> &blocks, const float *panels,
                     uint32_t n_tokens) {
    const int64_t width = blocks[0].tile_width;
    const int64_t tile_floats = width * tile_depth;
    const int64_t sum_floats = width * padded_pass(n_tokens, stream.kernels.gemm_panel);
    float *scratch =
        stream.tiles.floats(static_cast<uint64_t>((tile_floats + sum_floats) * stream.pool.n_threads()));
    stream.pool.run(static_cast<int64_t>(blocks.size()), [&](int64_t index, uint32_t thread) {
        float *tile = scratch + thread * (tile_floats + sum_floats);
        multiply_block(stream, blocks[static_cast<size_t>(index)], panels, n_tokens, tile,
                       tile + tile_floats);
    });
}

void multiply_packed(CpuStream &stream, std::span<const Product> products, const float *x,
                     uint32_t n_tokens) {
    const auto n_k = static_cast<int64_t>(products[0].matrix->n_cols);
    std::vector<OutputBlock> blocks;
    for (const RowChunk &chunk : split_rows(products, [](const Product &) { return tile_outputs; })) {
        const Product &product = *chunk.product;
        blocks.push_back({product.matrix->rows(product.row_begin, product.row_end),
                          &type_kernels(stream, *product.matrix), false, tile_outputs, chunk.begin,
                          chunk.end - chunk.begin, n_k,
                          product.bias == nullptr ? nullptr : product.bias + chunk.begin, product.out,
                          static_cast<int64_t>(product.row_end - product.row_begin)});
    }
    multiply_blocks(stream, blocks, pack_panels(stream, x, n_tokens, n_k), n_tokens);
}

std::vector<uint32_t> precise_tokens(const uint32_t *positions, uint32_t n_tokens) {
    std::vector<uint32_t> tokens;
    for (uint32_t token = 0; token < n_tokens; ++token) {
        if (is_precise(positions, token))
            tokens.push_back(token);
    }
    return tokens;
}

int64_t width_of(const Product &product) {
    return static_cast<int64_t>(product.row_end - product.row_begin);
}

// The rows of a chunk times the quantised tokens; second [n_twice, width]: where the second parts' results
// go.
void multiply_many_q8(const CpuStream &stream, const RowChunk &chunk, uint32_t n_tokens,
                      std::span<const uint32_t> twice, float *second) {
    const Product &product = *chunk.product;
    const pi_rows rows = chunk_rows(chunk);
    const int64_t width = width_of(product);
    const auto many_q8 = type_kernels(stream, *product.matrix).many_q8;
    const pi_q8_vector *tokens = stream.quantised.tokens.data();
    float *out = product.out + chunk.begin;
    many_q8(&rows, tokens, n_tokens, out, width);
    if (!twice.empty())
        many_q8(&rows, tokens + n_tokens, static_cast<int64_t>(twice.size()), second + chunk.begin, width);
    const int64_t n = chunk.end - chunk.begin;
    for (size_t i = 0; i < twice.size(); ++i)
        stream.kernels.add(second + static_cast<int64_t>(i) * width + chunk.begin, n, out + twice[i] * width);
    for (uint32_t token = 0; token < n_tokens && product.bias != nullptr; ++token)
        stream.kernels.add(product.bias + chunk.begin, n, out + token * width);
}

void multiply_many(CpuStream &stream, std::span<const Product> products, const float *x,
                   const uint32_t *positions, uint32_t n_tokens) {
    std::vector<Product> int8, floats;
    for (const Product &product : products)
        (uses_int8(stream, *product.matrix, n_tokens) ? int8 : floats).push_back(product);
    if (!floats.empty())
        multiply_packed(stream, floats, x, n_tokens);
    if (int8.empty())
        return;
    const std::vector<uint32_t> twice = precise_tokens(positions, n_tokens);
    quantise_input(stream, x, n_tokens, int8[0].matrix->n_cols, twice);
    int64_t most = 0;
    for (const Product &product : int8)
        most += width_of(product);
    float *second = stream.second.floats(twice.size() * static_cast<uint64_t>(most));
    const std::vector<RowChunk> chunks = split_rows(int8, [](const Product &) { return int8_chunk_rows; });
    stream.pool.run(static_cast<int64_t>(chunks.size()), [&](int64_t index, uint32_t) {
        const RowChunk &chunk = chunks[static_cast<size_t>(index)];
        int64_t before = 0; // rows of the products before this one
        for (const Product *product = int8.data(); product != chunk.product; ++product)
            before += width_of(*product);
        multiply_many_q8(stream, chunk, n_tokens, twice,
                         second + static_cast<int64_t>(twice.size()) * before);
    });
}

} // namespace

Scratch::~Scratch() {
    ::operator delete(data_, std::align_val_t{64});
}

float *Scratch::floats(uint64_t n) {
    if (n > capacity_) {
        ::operator delete(data_, std::align_val_t{64});
        data_ = nullptr;
        capacity_ = 0;
        data_ = static_cast<float *>(::operator new(n * sizeof(float), std::align_val_t{64}));
        capacity_ = n;
    }
    return data_;
}

int64_t rows_per_chunk(const CpuStream &stream, int64_t n_bytes, int64_t row_bytes) {
    if (stream.pool.n_threads() == 1) // nobody to share with
        return std::max(n_bytes / row_bytes, min_chunk_rows);
    const int64_t share = n_bytes / (stream.pool.n_threads() * chunks_per_thread);
    return std::max(std::clamp(share, min_chunk_bytes, max_chunk_bytes) / row_bytes, min_chunk_rows);
}

bool uses_int8(const CpuStream &stream, const Matrix &matrix, uint32_t n_tokens) {
    return stream.int8_activations && matrix.type->int8_activations &&
           (by_rows(stream, matrix, n_tokens) || type_kernels(stream, matrix).many_q8 != nullptr);
}

void quantise_input(CpuStream &stream, const float *x, uint32_t n_tokens, uint64_t n_cols,
                    std::span<const uint32_t> twice) {
    QuantisedInput &input = stream.quantised;
    const uint64_t n = n_tokens + twice.size();
    auto *q = input.q.as<int8_t>(n * n_cols);
    float *d = input.d.floats(n * n_cols / PI_QK);
    float *s = input.s.floats(n * n_cols / PI_QK);
    float *h = input.h.floats(n * n_cols / PI_QK * 2);
    input.tokens.clear();
    for (uint64_t token = 0; token < n; ++token) {
        const uint64_t begin = token * n_cols;
        const uint64_t block = begin / PI_QK;
        input.tokens.push_back({q + begin, d + block, s + block, h + 2 * block});
    }
    const auto quantise = [&](int64_t token, uint32_t) {
        const auto i = static_cast<size_t>(token);
        stream.kernels.quantize_q8(x + i * n_cols, static_cast<int64_t>(n_cols), &input.tokens[i]);
    };
    if (n_tokens > gemv_tokens) {
        stream.pool.run(n_tokens, quantise);
    } else { // not worth waking a thread
        for (uint32_t token = 0; token < n_tokens; ++token)
            quantise(token, 0);
    }
    float *rest = input.rest.floats(n_cols);
    for (size_t i = 0; i < twice.size(); ++i) {
        const pi_q8_vector &first = input.tokens[twice[i]];
        for (uint64_t k = 0; k < n_cols; ++k)
            rest[k] = x[twice[i] * n_cols + k] - first.d[k / PI_QK] * static_cast<float>(first.q[k]);
        stream.kernels.quantize_q8(rest, static_cast<int64_t>(n_cols), &input.tokens[n_tokens + i]);
    }
}

void cpu_matmul(CpuStream &stream, std::span<const Product> products, const float *x,
                const uint32_t *positions, uint32_t n_tokens) {
    if (n_tokens <= gemv_tokens)
        return multiply_by_rows(stream, products, x, positions, n_tokens);
    std::vector<Product> rows, others;
    for (const Product &product : products)
        (by_rows(stream, *product.matrix, n_tokens) ? rows : others).push_back(product);
    if (!rows.empty())
        multiply_by_rows(stream, rows, x, positions, n_tokens);
    if (!others.empty())
        multiply_many(stream, others, x, positions, n_tokens);
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
    multiply_blocks(stream, blocks, pack_panels(stream, h, n_tokens, n_k), n_tokens);
}

} // namespace pi
