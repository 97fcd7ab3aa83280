// cublaslt_library.h: the few entry points of cuBLASLt that a product needs, declared after its public
// documentation.
#pragma once

#include "gpu.h"

#include <cstddef>
#include <cstdint>

namespace pi_cuda {

struct CublasLtAlgorithm {
    uint64_t data[8];
};

struct CublasLtFound {
    CublasLtAlgorithm algorithm;
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

// All return 0 for success.
struct CublasLtLibrary {
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*make_operation)(void **out, int compute_type, int scale_type);
    int (*set_operation)(void *operation, int attribute, const void *value, size_t n_bytes);
    int (*make_layout)(void **out, int type, uint64_t rows, uint64_t columns, int64_t stride);
    int (*make_preference)(void **out);
    int (*set_preference)(void *preference, int attribute, const void *value, size_t n_bytes);
    int (*destroy_operation)(void *);
    int (*destroy_layout)(void *);
    int (*destroy_preference)(void *);
    int (*find)(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int n,
                CublasLtFound *out, int *n_found);
    int (*check)(void *handle, void *operation, void *a, void *b, void *c, void *d,
                 const CublasLtAlgorithm *algorithm, CublasLtFound *out);
    int (*describe)(const CublasLtAlgorithm *algorithm, int attribute, void *out, size_t n_bytes,
                    size_t *n_written);
    int (*multiply)(void *handle, void *operation, const void *alpha, const void *a, void *layout_a,
                    const void *b, void *layout_b, const void *beta, const void *c, void *layout_c, void *d,
                    void *layout_d, const CublasLtAlgorithm *algorithm, void *workspace,
                    size_t workspace_bytes, cudaStream_t stream);
};

// Loads it; throws Failure where it is not installed.
const CublasLtLibrary &cublaslt_library();
// Whether it is; loads it too.
bool has_cublaslt();

} // namespace pi_cuda
