// cublaslt_library.cu: NVIDIA's library, where it is installed.
#include "cublaslt_library.h"

#include "device.cuh"

#include <dlfcn.h>

namespace pi_cuda {
namespace {

CublasLtLibrary load() {
    void *library = nullptr;
    for (const char *name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
        if (library == nullptr)
            library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr)
        throw Failure{PI_FAILURE, "PI_GPU_GEMM=cublaslt: " + std::string(dlerror())};
    CublasLtLibrary out{};
    const auto look_up = [library](const char *name, auto &function) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
        if (function == nullptr)
            throw Failure{PI_FAILURE, std::string("cuBLASLt has no ") + name};
    };
    look_up("cublasLtCreate", out.create);
    look_up("cublasLtDestroy", out.destroy);
    look_up("cublasLtMatmulDescCreate", out.make_operation);
    look_up("cublasLtMatmulDescSetAttribute", out.set_operation);
    look_up("cublasLtMatrixLayoutCreate", out.make_layout);
    look_up("cublasLtMatmulPreferenceCreate", out.make_preference);
    look_up("cublasLtMatmulPreferenceSetAttribute", out.set_preference);
    look_up("cublasLtMatmulDescDestroy", out.destroy_operation);
    look_up("cublasLtMatrixLayoutDestroy", out.destroy_layout);
    look_up("cublasLtMatmulPreferenceDestroy", out.destroy_preference);
    look_up("cublasLtMatmulAlgoGetHeuristic", out.find);
    look_up("cublasLtMatmulAlgoCheck", out.check);
    look_up("cublasLtMatmulAlgoConfigGetAttribute", out.describe);
    look_up("cublasLtMatmul", out.multiply);
    return out;
}

} // namespace

const CublasLtLibrary &cublaslt_library() {
    static const CublasLtLibrary library = load(); // a load that fails is tried again
    return library;
}

bool has_cublaslt() {
    static const bool installed = [] {
        try {
            cublaslt_library();
            return true;
        } catch (const Failure &) {
            return false;
        }
    }();
    return installed;
}

} // namespace pi_cuda
