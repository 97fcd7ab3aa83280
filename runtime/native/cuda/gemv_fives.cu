// gemv_fives.cu: products with rows of some of the types.
#include "gemv.cuh"

namespace pi_cuda {

PI_DEFINE_GEMV(PI_KT_Q5_0)
PI_DEFINE_GEMV(PI_KT_Q5_1)
PI_DEFINE_GEMV(PI_KT_Q5_K)
PI_DEFINE_GEMV(PI_KT_Q6_K)

} // namespace pi_cuda
