// gemv_nibbles.cu: products with rows of some of the types.
#include "gemv.cuh"

namespace pi_cuda {

PI_DEFINE_GEMV(PI_KT_Q4_0)
PI_DEFINE_GEMV(PI_KT_Q4_1)
PI_DEFINE_GEMV(PI_KT_IQ4_NL)
PI_DEFINE_GEMV(PI_KT_MXFP4)
PI_DEFINE_GEMV(PI_KT_NVFP4)

} // namespace pi_cuda
