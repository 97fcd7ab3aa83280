// cublaslt.cu: the few entry points of cuBLASLt that a product needs, declared after its public
// documentation.
#include "cublaslt.h"

#include <cstdlib>
#include <dlfcn.h>
#include <memory>
#include <string_view>

namespace pi_cuda {
namespace {

// Values of cublasLt.h and library_types.h.
constexpr int compute_float32 = 68, type_float32 = 0, type_float16 = 2;
constexpr int attribute_transpose_a = 3, preference_workspace = 1, preference_alignments[] = {5, 6, 7, 8};
constexpr uint32_t alignment_bytes = 16; // of every operand
constexpr size_t most_shapes = 512;      // whose ways are kept

struct Algorithm {
    uint64_t data[8];
};

struct Found {
    Algorithm algorithm;
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
};

// out [n_tokens, out_stride] *= 1 / scale, so that what is added to it may be scaled as well. Block: a token.
__global__ void unscale_kernel(const __grid_constant__ Gemm work) {
    const float scale = work.x.scale[blockIdx.x];
    float *out = work.out + uint64_t{work.out_stride} * blockIdx.x;
    if (scale == 1.0f)
        return;
    for (uint32_t i = threadIdx.x; i < work.n_out; i += blockDim.x)
        out[i] /= scale;
}

__global__ void finish_kernel(const __grid_constant__ Gemm work) {
    const float scale = work.x.scale[blockIdx.x];
    float *out = work.out + uint64_t{work.out_stride} * blockIdx.x;
    if (scale == 1.0f && work.bias == nullptr && !work.relu)
        return;
    for (uint32_t i = threadIdx.x; i < work.n_out; i += blockDim.x) {
        const float value = out[i] * scale + (work.bias == nullptr ? 0.0f : work.bias[i]);
        out[i] = work.relu ? fmaxf(value, 0.0f) : value;
    }
}

void require_success(int status, const char *what) {
    if (status != 0)
        throw Failure{PI_FAILURE,
                      std::string(what) + ": cuBLASLt failed with status " + std::to_string(status)};
}

} // namespace

struct CublasLt::Functions {
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*make_operation)(void **out, int compute_type, int scale_type);
    int (*set_operation)(void *operation, int attribute, const void *value, size_t n_bytes);
    int (*make_layout)(void **out, int type, uint64_t rows, uint64_t columns, int64_t stride);
    int (*make_preference)(void **out);
    int (*set_preference)(void *preference, int attribute, const void *value, size_t n_bytes);
    int (*destroy_operation)(void *);
    int (*destroy_layout)(void *);
    int (*destroy_preference)(void *);
    int (*find)(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int n,
                Found *out, int *n_found);
    int (*multiply)(void *handle, void *operation, const void *alpha, const void *a, void *layout_a,
                    const void *b, void *layout_b, const void *beta, const void *c, void *layout_c, void *d,
                    void *layout_d, const Algorithm *algorithm, void *workspace, size_t workspace_bytes,
                    cudaStream_t stream);

    Functions() {
        void *library = nullptr;
        for (const char *name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
            if (library == nullptr)
                library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        }
        if (library == nullptr)
            throw Failure{PI_FAILURE, "PI_GPU_GEMM=cublaslt: " + std::string(dlerror())};
        const auto look_up = [library](const char *name, auto &function) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
            if (function == nullptr)
                throw Failure{PI_FAILURE, std::string("cuBLASLt has no ") + name};
        };
        look_up("cublasLtCreate", create);
        look_up("cublasLtDestroy", destroy);
        look_up("cublasLtMatmulDescCreate", make_operation);
        look_up("cublasLtMatmulDescSetAttribute", set_operation);
        look_up("cublasLtMatrixLayoutCreate", make_layout);
        look_up("cublasLtMatmulPreferenceCreate", make_preference);
        look_up("cublasLtMatmulPreferenceSetAttribute", set_preference);
        look_up("cublasLtMatmulDescDestroy", destroy_operation);
        look_up("cublasLtMatrixLayoutDestroy", destroy_layout);
        look_up("cublasLtMatmulPreferenceDestroy", destroy_preference);
        look_up("cublasLtMatmulAlgoGetHeuristic", find);
        look_up("cublasLtMatmul", multiply);
    }
};

struct CublasLt::Way {
    explicit Way(const Functions &with) : functions(with) {}
    ~Way() {
        if (operation != nullptr)
            functions.destroy_operation(operation);
        for (void *layout : {a, b, d}) {
            if (layout != nullptr)
                functions.destroy_layout(layout);
        }
    }
    Way(const Way &) = delete;
    Way &operator=(const Way &) = delete;

    const Functions &functions;
    void *operation = nullptr, *a = nullptr, *b = nullptr, *d = nullptr;
    Found found{};
    bool known = false;
};

bool CublasLt::is_wanted() {
    const char *value = std::getenv("PI_GPU_GEMM");
    if (value == nullptr || std::string_view(value) == "own")
        return false;
    if (std::string_view(value) != "cublaslt")
        throw Failure{PI_USAGE, "PI_GPU_GEMM is neither own nor cublaslt"};
    return true;
}

CublasLt::CublasLt()
    : functions_([]() -> const Functions & {
          static const Functions functions;
          return functions;
      }()) {
    require_success(functions_.create(&handle_), "opening");
}

CublasLt::~CublasLt() {
    functions_.destroy(handle_);
}

// Rows of w and x are columns to cuBLASLt, which computes out^T [n_out, n_tokens] = w x^T.
const CublasLt::Way &CublasLt::way_of(const pi_gpu &gpu, const Gemm &work) {
    const uint64_t workspace_bytes = gpu.partials.n_bytes;
    const Shape shape = {work.transposed, work.n_out,      work.x.n_tokens, work.n_k,       work.w_stride,
                         work.x.n_k,      work.out_stride, work.accumulate, workspace_bytes};
    if (const auto known = ways_.find(shape); known != ways_.end())
        return known->second;
    if (ways_.size() >= most_shapes)
        ways_.clear();
    Way &way = ways_.try_emplace(shape, functions_).first->second;
    const Functions &f = functions_;
    require_success(f.make_operation(&way.operation, compute_float32, type_float32), "describing a product");
    const int32_t transpose = work.transposed ? 0 : 1;
    require_success(f.set_operation(way.operation, attribute_transpose_a, &transpose, sizeof transpose),
                    "describing a product");
    const uint64_t rows = work.transposed ? work.n_out : work.n_k,
                   columns = work.transposed ? work.n_k : work.n_out;
    require_success(f.make_layout(&way.a, type_float16, rows, columns, work.w_stride), "describing weights");
    require_success(f.make_layout(&way.b, type_float16, work.n_k, work.x.n_tokens, work.x.n_k),
                    "describing activations");
    require_success(f.make_layout(&way.d, type_float32, work.n_out, work.x.n_tokens, work.out_stride),
                    "describing an output");
    void *preference = nullptr;
    require_success(f.make_preference(&preference), "choosing an algorithm");
    const std::unique_ptr<void, int (*)(void *)> owner(preference, f.destroy_preference);
    require_success(
        f.set_preference(preference, preference_workspace, &workspace_bytes, sizeof workspace_bytes),
        "choosing an algorithm");
    for (const int attribute : preference_alignments)
        require_success(f.set_preference(preference, attribute, &alignment_bytes, sizeof alignment_bytes),
                        "choosing an algorithm");
    int n_found = 0;
    const int status =
        f.find(handle_, way.operation, way.a, way.b, way.d, way.d, preference, 1, &way.found, &n_found);
    way.known = status == 0 && n_found == 1 && way.found.status == 0;
    return way;
}

bool CublasLt::run(pi_gpu &gpu, const Gemm &work) {
    const Way &way = way_of(gpu, work);
    if (!way.known)
        return false;
    if (work.accumulate)
        launch("scaling sums", gpu, unscale_kernel, work.x.n_tokens, 256, 0, work);
    const float alpha = 1.0f, beta = work.accumulate ? 1.0f : 0.0f;
    require_success(functions_.multiply(handle_, way.operation, &alpha, work.w, way.a,
                                        work.x.data + work.k_begin, way.b, &beta, work.out, way.d, work.out,
                                        way.d, &way.found.algorithm, gpu.partials.data, gpu.partials.n_bytes,
                                        gpu.stream),
                    "a product");
    ++gpu.n_launches;
    launch("finishing a product", gpu, finish_kernel, work.x.n_tokens, 256, 0, work);
    return true;
}

} // namespace pi_cuda
