// cublaslt.cpp: a library like cuBLASLt on the emulated device, with two kernels: up to 64 tokens, and more.
// It trusts nothing that was not declared to it: operands are read as their layouts say.
#include "cuda/cublaslt_library.h"
#include "cuda/loading.h"

#include <algorithm>
#include <cstring>

namespace pi_cuda {
namespace {

struct Layout {
    uint64_t rows, columns, stride;
};

int make_object(void **out) {
    *out = new char;
    return 0;
}

int destroy_object(void *object) {
    delete static_cast<char *>(object);
    return 0;
}

int make_operation(void **out, int, int) {
    *out = new int32_t{0};
    return 0;
}

int set_operation(void *operation, int, const void *value, size_t n_bytes) {
    std::memcpy(operation, value, n_bytes);
    return 0;
}

int destroy_operation(void *operation) {
    delete static_cast<int32_t *>(operation);
    return 0;
}

int make_layout(void **out, int, uint64_t rows, uint64_t columns, int64_t stride) {
    *out = new Layout{rows, columns, static_cast<uint64_t>(stride)};
    return 0;
}

int destroy_layout(void *layout) {
    delete static_cast<Layout *>(layout);
    return 0;
}

int set_preference(void *, int, const void *, size_t) {
    return 0;
}

// Nothing for products of fewer than 64 outputs.
int find(void *, void *, void *, void *, void *, void *d, void *, int, CublasLtFound *out, int *n_found) {
    const Layout &to = *static_cast<Layout *>(d);
    *out = {};
    out->algorithm.data[0] = to.columns > 64 ? 1 : 0;
    *n_found = to.rows >= 64 ? 1 : 0;
    return 0;
}

int check(void *, void *, void *, void *, void *, void *, const CublasLtAlgorithm *, CublasLtFound *out) {
    *out = {};
    return 0;
}

int describe(const CublasLtAlgorithm *algorithm, int attribute, void *out, size_t n_bytes, size_t *) {
    std::memset(out, 0, n_bytes);
    if (attribute == 0)
        std::memcpy(out, algorithm->data, n_bytes);
    return 0;
}

struct Product {
    bool transposed; // a is [k, rows of d], in columns
    Layout of_a, of_b, of_d;
    const __half *a, *b;
    float alpha, beta;
    float *d;

    void run() const {
        for (uint64_t t = 0; t < of_d.columns; ++t) {
            for (uint64_t row = 0; row < of_d.rows; ++row) {
                float sum = 0;
                for (uint64_t k = 0; k < of_b.rows; ++k)
                    sum += emulator::from_half(
                               a[transposed ? row * of_a.stride + k : k * of_a.stride + row].bits) *
                           emulator::from_half(b[t * of_b.stride + k].bits);
                float &out = d[t * of_d.stride + row];
                out = alpha * sum + (beta == 0.0f ? 0.0f : beta * out);
            }
        }
    }
};

int multiply(void *, void *operation, const void *alpha, const void *a, void *layout_a, const void *b,
             void *layout_b, const void *beta, const void *, void *, void *d, void *layout_d,
             const CublasLtAlgorithm *, void *, size_t, cudaStream_t) {
    const Product product = {*static_cast<int32_t *>(operation) != 0,
                             *static_cast<Layout *>(layout_a),
                             *static_cast<Layout *>(layout_b),
                             *static_cast<Layout *>(layout_d),
                             static_cast<const __half *>(a),
                             static_cast<const __half *>(b),
                             *static_cast<const float *>(alpha),
                             *static_cast<const float *>(beta),
                             static_cast<float *>(d)};
    emulator::queue([=] { product.run(); });
    return 0;
}

} // namespace

const CublasLtLibrary &cublaslt_library() {
    static const CublasLtLibrary library = {
        make_object, destroy_object, make_operation,    set_operation,  make_layout,
        make_object, set_preference, destroy_operation, destroy_layout, destroy_object,
        find,        check,          describe,          multiply,
    };
    return library;
}

// Only where it is asked for, so that tests run the own kernel.
bool has_cublaslt() {
    return false;
}

void choose_loading(bool) {}
bool may_load_when_used() {
    return true;
}
void load_own_kernels() {}

} // namespace pi_cuda
