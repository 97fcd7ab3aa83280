// matmul.cpp: matrix products on the CPU. Few tokens: rows of weights against vectors, int8 or float. Many
// tokens: int8 products, or tiles (tiles.cpp).
#include "stream.h"

#include <algorithm>
#include <new>

namespace pi {
namespace {

// Every chunk starts cold (kernels/simd/prefetch.inl), so they are large where the weights are many; several
// for a thread even out cores of different speed.
constexpr int64_t min_chunk_bytes = 16 * 1024;
constexpr int64_t max_chunk_bytes = 1024 * 1024;
constexpr int64_t chunks_per_thread = 4;
constexpr int64_t min_chunk_rows = 8;
constexpr int64_t int8_chunk_rows = 32; // of many tokens' int8 product: one tile of the kernel
constexpr uint32_t max_row_tokens = 16;

struct RowChunk {
    const Product *product;
    int64_t begin; // rows within the product's range
    int64_t end;
};

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
        multiply_tiles(stream, floats, x, n_tokens);
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
           (by_rows(stream, matrix, n_tokens) ||
            (type_kernels(stream, matrix).many_q8 != nullptr &&
             (n_tokens <= max_row_tokens || !rounds_tiles(stream, matrix))));
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

} // namespace pi
