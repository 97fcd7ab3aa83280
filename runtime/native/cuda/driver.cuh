// driver.cuh: functions of the driver, looked up through cudart, so that nothing links libcuda.
#pragma once

#include "device.cuh"

#include <cuda.h>

namespace pi_cuda {

// The function as it was in a version of CUDA (12000: 12.0). Throws Failure where the driver has none.
template <typename Function>
void find_driver_function(const char *name, int version, Function &out) {
    void *address = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t result = cudaGetDriverEntryPointByVersion(
        name, &address, static_cast<unsigned>(version), cudaEnableDefault, &found);
#else
    static_cast<void>(version);
    const cudaError_t result = cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &found);
#endif
    check(result, name);
    if (found != cudaDriverEntryPointSuccess || address == nullptr)
        throw Failure{PI_FAILURE,
                      std::string("the NVIDIA driver has no ") + name + ": install a newer driver"};
    out = reinterpret_cast<Function>(address);
}

} // namespace pi_cuda
