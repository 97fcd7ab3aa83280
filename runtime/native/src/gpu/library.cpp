#include "library.h"

#include <cstdlib>
#include <dlfcn.h>

namespace pi {
namespace {

// The library beside this one, unless $PI_GPU_LIB names another (tests).
std::string library_path() {
    const char *named = std::getenv("PI_GPU_LIB");
    if (named != nullptr && *named != '\0')
        return named;
    Dl_info self{};
    if (dladdr(reinterpret_cast<const void *>(&pi_abi_version), &self) == 0 || self.dli_fname == nullptr)
        throw Error(PI_FAILURE, "libpi cannot tell where it was loaded from");
    const std::string path = self.dli_fname;
    return path.substr(0, path.rfind('/') + 1) + "libpi_cuda.so";
}

const pi_gpu_api &load() {
    const std::string path = library_path();
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        throw Error(PI_FAILURE, "no device library: " + std::string(dlerror()),
                    "build with the CUDA compiler (nvcc), or use --vram-budget 0");
    const auto get = reinterpret_cast<pi_gpu_api_get_fn>(dlsym(library, PI_GPU_ENTRY));
    const pi_gpu_api *api = get == nullptr ? nullptr : get(PI_GPU_ABI);
    if (api == nullptr) {
        dlclose(library);
        throw Error(PI_FAILURE, path + " is of another version", "build libpi and libpi_cuda together");
    }
    return *api; // stays loaded: contexts do not go away either
}

void require_driver() {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (driver == nullptr)
        throw Error(PI_FAILURE, "no NVIDIA driver: " + std::string(dlerror()), "use --vram-budget 0");
    dlclose(driver);
}

} // namespace

const pi_gpu_api &gpu_library() {
    if (std::getenv("PI_GPU_LIB") == nullptr)
        require_driver();
    static const pi_gpu_api &api = load(); // a load that fails is tried again
    return api;
}

void check_gpu(const pi_gpu_api &api, int32_t status) {
    if (status == PI_OK)
        return;
    throw Error(status, "device: " + std::string(api.error()),
                status == PI_DOES_NOT_FIT
                    ? "raise --vram-budget, lower -c or -b, or end other programs on the device"
                    : "");
}

GpuDevice::GpuDevice(uint32_t ordinal, uint64_t budget_bytes) : api_(gpu_library()) {
    check_gpu(api_, api_.open(ordinal, budget_bytes, &handle_));
}

pi_gpu_info GpuDevice::info() const {
    pi_gpu_info info{};
    call(&pi_gpu_api::info, &info);
    return info;
}

} // namespace pi
