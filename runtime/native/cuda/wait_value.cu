// wait_value.cu: a stream that waits for a value in memory by itself, without a kernel.
#include "wait_value.h"

#include "driver.cuh"

namespace pi_cuda {
namespace {

decltype(&cuStreamWaitValue32) wait_value() {
    static const auto function = [] {
        decltype(&cuStreamWaitValue32) found = nullptr;
        find_driver_function("cuStreamWaitValue32", 12000, found);
        return found;
    }();
    return function;
}

} // namespace

bool can_wait_for_values() {
    try {
        return wait_value() != nullptr;
    } catch (const Failure &) {
        return false;
    }
}

void wait_for_value(cudaStream_t stream, const uint32_t *at, uint32_t value) {
    const auto address = reinterpret_cast<CUdeviceptr>(at);
    const CUresult result = wait_value()(stream, address, value, CU_STREAM_WAIT_VALUE_GEQ);
    if (result != CUDA_SUCCESS)
        throw Failure{PI_FAILURE, "waiting for a value failed with driver error " + std::to_string(result)};
}

} // namespace pi_cuda
