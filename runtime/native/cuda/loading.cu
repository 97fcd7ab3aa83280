// loading.cu: the modules of this library, found through the kernel that each file registers (gpu.h).
#include "loading.h"

#include "driver.cuh"

#include <cstdlib>
#include <dlfcn.h>
#include <string_view>

namespace pi_cuda {
namespace {

constexpr int driver_version = 12040;
constinit const FileKernels *last_registered = nullptr;

struct Driver {
    CUresult (*module_of)(CUmodule *, CUfunction);
    CUresult (*count)(unsigned *, CUmodule);
    CUresult (*enumerate)(CUfunction *, unsigned, CUmodule);
    CUresult (*load)(CUfunction);

    Driver() {
        find_driver_function("cuFuncGetModule", driver_version, module_of);
        find_driver_function("cuModuleGetFunctionCount", driver_version, count);
        find_driver_function("cuModuleEnumerateFunctions", driver_version, enumerate);
        find_driver_function("cuFuncLoad", driver_version, load);
    }
};

void require_loaded(CUresult result) {
    if (result != CUDA_SUCCESS)
        throw Failure{result == CUDA_ERROR_OUT_OF_MEMORY ? PI_DOES_NOT_FIT : PI_FAILURE,
                      "loading kernels failed with driver error " + std::to_string(result)};
}

void load_all(const Driver &driver, const void *kernel) {
    cudaFunction_t one = nullptr;
    check(cudaGetFuncBySymbol(&one, kernel), "looking for kernels");
    CUmodule module = nullptr;
    require_loaded(driver.module_of(&module, one));
    unsigned n = 0;
    require_loaded(driver.count(&n, module));
    std::vector<CUfunction> functions(n);
    require_loaded(driver.enumerate(functions.data(), n, module));
    for (const CUfunction function : functions)
        require_loaded(driver.load(function));
}

} // namespace

FileKernels::FileKernels(const void *one) : kernel(one), before(last_registered) {
    last_registered = this;
}

bool may_load_when_used() {
    const char *chosen = std::getenv("CUDA_MODULE_LOADING");
    if (chosen != nullptr && std::string_view(chosen) != "LAZY")
        return false;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (driver == nullptr)
        return false;
    // This one does not start the driver, which would read the variable.
    const auto version_of = reinterpret_cast<CUresult (*)(int *)>(dlsym(driver, "cuDriverGetVersion"));
    int version = 0;
    const bool known = version_of != nullptr && version_of(&version) == CUDA_SUCCESS;
    dlclose(driver);
    return known && version >= driver_version;
}

void choose_loading(bool when_used) {
    static const int done = setenv("CUDA_MODULE_LOADING", when_used ? "LAZY" : "EAGER", 0);
    static_cast<void>(done);
}

void load_own_kernels() {
    const Driver driver;
    for (const FileKernels *file = last_registered; file != nullptr; file = file->before)
        load_all(driver, file->kernel);
}

} // namespace pi_cuda
