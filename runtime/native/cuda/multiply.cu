// multiply.cu: which kernel computes a product: rows against a few vectors, or tiles on the matrix units.
#include "gemv.cuh"
#include "operations.h"
#include "rows.cuh"

#include <algorithm>

namespace pi_cuda {
namespace {

constexpr uint32_t gemv_tokens = 16; // up to this many; float32 rows always: the matrix units round them
constexpr uint64_t tile_elements = 28u
                                   << 20; // at most of a matrix dequantised at a time: it stays in the cache

Vectors vectors_of(const float *x, uint32_t n_columns, uint32_t n_cols, const pi_gpu_norm *norm) {
    Vectors vectors{};
    vectors.n_cols = vectors.stride = n_cols;
    vectors.n_columns = n_columns;
    vectors.x = x;
    if (norm != nullptr) {
        vectors.gain = norm->gain;
        vectors.eps = norm->eps;
    }
    return vectors;
}

void add_product(GemvLaunch &work, uint32_t i, const pi_gpu_product &of, uint32_t token) {
    GemvProduct &product = work.product[i];
    work.row_stride = static_cast<uint32_t>(of.rows.row_stride); // the same for all
    product.rows = static_cast<const uint8_t *>(of.rows.data) - of.rows.row_stride * work.n_rows;
    product.first_row = work.n_rows;
    product.n_rows = of.rows.n_rows;
    product.bias = of.bias;
    product.out = of.out + uint64_t{token} * of.rows.n_rows;
    product.add = of.add;
    product.relu = of.relu;
    work.n_rows += of.rows.n_rows;
}

// Products [0, n) that are of this type, in launches of at most 8 vectors.
void multiply_vectors(pi_gpu &gpu, const pi_gpu_product *products, uint32_t n, uint32_t kernel_type,
                      const float *x, uint32_t n_tokens, const pi_gpu_norm *norm) {
    for (uint32_t token = 0; token < n_tokens; token += gemv_max_columns) {
        GemvLaunch work{};
        const uint64_t n_cols = products[0].rows.n_cols;
        work.vectors = vectors_of(x + n_cols * token, std::min(gemv_max_columns, n_tokens - token),
                                  products[0].rows.n_cols, norm);
        work.normed = norm == nullptr || norm->out == nullptr ? nullptr : norm->out + n_cols * token;
        uint32_t n_products = 0;
        for (uint32_t i = 0; i < n; ++i) {
            if (products[i].rows.kernel_type == kernel_type)
                add_product(work, n_products++, products[i], token);
        }
        for (uint32_t i = n_products; i < PI_GPU_MAX_PRODUCTS; ++i)
            work.product[i].first_row = UINT32_MAX;
        for_type(kernel_type, [&]<int type>() { run_gemv<type>(gpu, work); });
    }
}

// Whether a product reads the rows where they are, as often as it has tiles of tokens.
bool is_half(const pi_gpu_rows &rows) {
    return rows.kernel_type == PI_KT_F16 && rows.on_host == 0;
}

// Rows [first, first + n) as float16 in device memory: in scratch unless they are so.
const __half *half_rows(pi_gpu &gpu, const pi_gpu_rows &rows, uint32_t first, uint32_t n) {
    pi_gpu_rows part = rows;
    part.data = static_cast<const uint8_t *>(rows.data) + rows.row_stride * first;
    part.n_rows = n;
    if (is_half(rows))
        return static_cast<const __half *>(part.data);
    auto *out = scratch_of<__half>(gpu, gpu.tile, uint64_t{n} * rows.n_cols);
    dequantise_to_half(gpu, part, out);
    return out;
}

// Rows of a tile, about as many in each: a multiple of 32, so that every tile but the last is.
uint32_t tile_rows(const pi_gpu_rows &rows) {
    if (is_half(rows))
        return rows.n_rows;
    const uint32_t most = static_cast<uint32_t>(std::max<uint64_t>(tile_elements / rows.n_cols / 32, 1)) * 32;
    return ceil_div(ceil_div(rows.n_rows, ceil_div(rows.n_rows, most)), 32) * 32;
}

void multiply_tiles(pi_gpu &gpu, const pi_gpu_product &product, const Halves &x) {
    const pi_gpu_rows &rows = product.rows;
    const uint32_t each = tile_rows(rows);
    for (uint32_t first = 0; first < rows.n_rows; first += each) {
        const uint32_t n = std::min(each, rows.n_rows - first);
        Gemm work{};
        work.x = x;
        work.n_k = rows.n_cols;
        work.w = half_rows(gpu, rows, first, n);
        work.w_stride = rows.n_cols;
        work.n_out = n;
        work.bias = product.bias == nullptr ? nullptr : product.bias + first;
        work.out = product.out + first;
        work.accumulate = product.add != 0;
        work.relu = product.relu != 0;
        work.out_stride = rows.n_rows;
        run_gemm(gpu, work);
    }
}

void require_products(const pi_gpu_product *products, uint32_t n) {
    if (n == 0 || n > PI_GPU_MAX_PRODUCTS)
        throw Failure{PI_FAILURE, "a wrong number of products"};
    for (uint32_t i = 0; i < n; ++i) {
        require_rows(products[i].rows);
        if (products[i].rows.n_cols != products[0].rows.n_cols)
            throw Failure{PI_FAILURE, "products of one vector have different lengths"};
    }
}

// The predictor becomes part of the work, or its mask is made first.
void predict_in(pi_gpu &gpu, const pi_gpu_predictor &of, NeuronsLaunch &work) {
    const pi_gpu_rows &fc2 = of.fc2;
    require_rows(fc2);
    if (fc2.n_rows != work.n_rows)
        throw Failure{PI_FAILURE, "a predictor of another number of neurons"};
    if (has_logits(fc2.kernel_type, fc2.n_cols)) {
        work.logits = logits_of(of);
        return;
    }
    multiply_logits(gpu, of);
    mask_rows(gpu, {nullptr, of.logits, 1, fc2.n_rows, of.threshold, 0, of.mask, {}});
    work.mask = of.mask;
}

bool as_vectors(uint32_t kernel_type, uint32_t n_tokens) {
    return n_tokens <= gemv_tokens || kernel_type == PI_KT_F32;
}

} // namespace

void multiply_logits(pi_gpu &gpu, const pi_gpu_predictor &of) {
    const pi_gpu_product product = {of.fc2, nullptr, of.logits, 0, 0};
    multiply_vectors(gpu, &product, 1, of.fc2.kernel_type, of.hidden, 1, nullptr);
}

int32_t multiply(pi_gpu *gpu, const pi_gpu_product *products, uint32_t n, const float *x, uint32_t n_tokens,
                 const pi_gpu_norm *norm) {
    return operate(gpu, [&](pi_gpu &device) {
        require_products(products, n);
        Halves halves{};
        for (uint32_t i = 0; i < n; ++i) {
            const uint32_t type = products[i].rows.kernel_type;
            if (as_vectors(type, n_tokens)) {
                const auto same = [type](const pi_gpu_product &p) { return p.rows.kernel_type == type; };
                if (std::none_of(products, products + i, same)) // the first of its type takes them all
                    multiply_vectors(device, products, n, type, x, n_tokens, norm);
                continue;
            }
            const uint32_t n_cols = products[0].rows.n_cols;
            if (halves.data == nullptr && norm != nullptr)
                normalise(device, x, norm->gain, n_tokens, n_cols, norm->eps, norm->out);
            if (halves.data == nullptr)
                halves = to_halves(device, norm == nullptr ? x : norm->out, n_tokens, n_cols);
            multiply_tiles(device, products[i], halves);
        }
    });
}

int32_t neurons(pi_gpu *gpu, const pi_gpu_neurons *of) {
    return operate(gpu, [&](pi_gpu &device) {
        require_rows(of->gate);
        require_rows(of->up);
        if (of->gate.n_cols != of->up.n_cols || of->gate.n_rows != of->up.n_rows)
            throw Failure{PI_FAILURE, "gate and up are of different shapes"};
        NeuronsLaunch work{};
        work.vectors = vectors_of(of->x, 1, of->gate.n_cols, of->norm);
        work.n_rows = of->gate.n_rows;
        work.mask = of->mask;
        work.relu = of->activation == PI_ACTIVATION_RELU ? 1 : 0;
        work.threshold = of->threshold;
        work.out = of->out;
        work.n_masked = reinterpret_cast<unsigned long long *>(of->n_masked);
        work.n_active = reinterpret_cast<unsigned long long *>(of->n_active);
        work.gate = static_cast<const uint8_t *>(of->gate.data);
        work.row_stride = of->gate.row_stride;
        if (of->predictor != nullptr)
            predict_in(device, *of->predictor, work);
        const bool together = of->gate.kernel_type == of->up.kernel_type;
        work.up = together ? static_cast<const uint8_t *>(of->up.data) : nullptr;
        for_type(of->gate.kernel_type, [&]<int type>() { run_neurons<type>(device, work); });
        if (together)
            return;
        work.n_masked = work.n_active = nullptr;
        work.gate = nullptr;
        work.mask = nullptr; // what it closes is 0 by now
        work.logits = {};
        work.up = static_cast<const uint8_t *>(of->up.data);
        work.row_stride = of->up.row_stride;
        for_type(of->up.kernel_type, [&]<int type>() { run_neurons<type>(device, work); });
    });
}

// One token after the other as sums of rows, many on the matrix units.
int32_t multiply_transposed(pi_gpu *gpu, const pi_gpu_rows *rows, const float *h, uint32_t n_tokens,
                            uint32_t add, float *out) {
    return operate(gpu, [&](pi_gpu &device) {
        require_rows(*rows);
        if (as_vectors(rows->kernel_type, n_tokens)) {
            for (uint32_t t = 0; t < n_tokens; ++t)
                accumulate_rows(device, *rows, h + uint64_t{t} * rows->n_rows, add != 0,
                                out + uint64_t{t} * rows->n_cols);
            return;
        }
        Gemm work{};
        work.x = to_halves(device, h, n_tokens, rows->n_rows);
        work.w_stride = rows->n_cols;
        work.transposed = true;
        work.n_out = rows->n_cols;
        work.out = out;
        work.out_stride = rows->n_cols;
        const uint32_t each = tile_rows(*rows);
        for (uint32_t first = 0; first < rows->n_rows; first += each) {
            work.k_begin = first;
            work.n_k = std::min(each, rows->n_rows - first);
            work.w = half_rows(device, *rows, first, work.n_k);
            work.accumulate = first > 0 || add != 0;
            run_gemm(device, work);
        }
    });
}

} // namespace pi_cuda
