// cublaslt.h: large products by cuBLASLt, a library of NVIDIA's that is used where it is installed.
#pragma once

#include "cublaslt_library.h"
#include "rows.cuh"

#include <array>
#include <map>
#include <set>

namespace pi_cuda {

class CublasLt {
  public:
    // $PI_GPU_GEMM: `cublaslt`, `own`, or unset: where the library is installed and its kernels can be loaded
    // one by one, since all of them take too much. Throws Failure for anything else.
    static bool is_wanted();
    // Opens it for the current device, which is this one, and loads kernels. Throws Failure; but where
    // nothing asked for the library it is just not wanted from then on.
    static void try_out(int ordinal);
    // For the current device, which is this one. The first of a device loads the kernels that products of
    // models' shapes take; run() uses no others, so that nothing is loaded later. Throws Failure without the
    // library.
    explicit CublasLt(int ordinal);
    ~CublasLt();
    CublasLt(const CublasLt &) = delete;
    CublasLt &operator=(const CublasLt &) = delete;

    // False where it has no kernel for this shape.
    bool run(pi_gpu &gpu, const Gemm &work);

  private:
    struct Shape {
        bool transposed, accumulate;
        uint64_t n_out, n_tokens, n_k, w_stride, x_stride, out_stride, workspace_bytes;
        auto operator<=>(const Shape &) const = default;
    };
    struct Way; // descriptions of a shape, and the algorithm
    // All that tells one kernel from another: an algorithm's settings, the operands' order, and whether it
    // adds.
    using Kernel = std::array<uint32_t, 11>;
    using Kernels = std::set<Kernel>;

    const Way &way_of(const Shape &shape);
    std::vector<CublasLtFound> find(const Way &way, const Shape &shape, int n) const;
    // Whether the kernel is loaded and takes the shape too.
    bool is_usable(const Way &way, const Shape &shape, const CublasLtAlgorithm &algorithm) const;
    Kernel kernel_of(const CublasLtAlgorithm &algorithm, const Shape &shape) const;
    int multiply(const Way &way, const Shape &shape, const CublasLtAlgorithm &algorithm, const void *w,
                 const void *x, void *out, void *workspace, cudaStream_t stream) const;
    const Kernels &kernels_of(int ordinal) const;
    Kernels load_kernels() const;
    void load_best(const Shape &shape, void *memory, Kernels &loaded) const;

    const CublasLtLibrary &library_;
    void *handle_ = nullptr;
    const Kernels *kernels_ = nullptr;
    std::map<Shape, Way> ways_;
};

} // namespace pi_cuda
