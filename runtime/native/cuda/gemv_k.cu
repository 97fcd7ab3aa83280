// gemv_k.cu: products with rows of some of the types.
#include "gemv.cuh"

namespace pi_cuda {

PI_DEFINE_GEMV(PI_KT_Q2_K)
PI_DEFINE_GEMV(PI_KT_Q3_K)
PI_DEFINE_GEMV(PI_KT_Q4_K)

} // namespace pi_cuda
