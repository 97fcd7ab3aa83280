// gemv_floats.cu: products with rows of some of the types.
#include "gemv.cuh"

namespace pi_cuda {

PI_DEFINE_GEMV(PI_KT_F32)
PI_DEFINE_GEMV(PI_KT_F16)
PI_DEFINE_GEMV(PI_KT_BF16)
PI_DEFINE_GEMV(PI_KT_Q8_0)

} // namespace pi_cuda
