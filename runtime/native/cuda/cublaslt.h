// cublaslt.h: large products by cuBLASLt, a library of NVIDIA's that is loaded only where $PI_GPU_GEMM asks
// for it.
#pragma once

#include "rows.cuh"

#include <array>
#include <map>

namespace pi_cuda {

class CublasLt {
  public:
    // Whether $PI_GPU_GEMM is `cublaslt`; unset or `own`: it is not. Throws Failure for anything else.
    static bool is_wanted();
    // For the current device. Throws Failure without the library.
    CublasLt();
    ~CublasLt();
    CublasLt(const CublasLt &) = delete;
    CublasLt &operator=(const CublasLt &) = delete;

    // False where it knows no way for this shape.
    bool run(pi_gpu &gpu, const Gemm &work);

  private:
    struct Functions;
    struct Way; // descriptions of a shape, and the algorithm
    using Shape = std::array<uint64_t, 9>;

    const Way &way_of(const pi_gpu &gpu, const Gemm &work);

    const Functions &functions_;
    void *handle_ = nullptr;
    std::map<Shape, Way> ways_;
};

} // namespace pi_cuda
