// cublaslt.cu: which of cuBLASLt's kernels are loaded, and the way that a product takes.
#include "cublaslt.h"

#include "loading.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <mutex>
#include <string_view>

namespace pi_cuda {
namespace {

// Values of cublasLt.h and library_types.h.
constexpr int compute_float32 = 68, type_float32 = 0, type_float16 = 2;
constexpr int attribute_transpose_a = 3, preference_workspace = 1, preference_alignments[] = {5, 6, 7, 8};
constexpr int n_algorithm_attributes = 9, attribute_splits = 2, first_short_attribute = 7;
constexpr uint32_t alignment_bytes = 16; // of every operand
constexpr size_t most_shapes = 512;      // whose ways are kept
constexpr int n_candidates = 8;          // best first, of which one with a loaded kernel is taken

// Shapes whose kernels are loaded: rows of 1B to 70B models, or of the tiles that they are dequantised in. On
// an H200 their 104 kernels are the first choice of nine in ten of 352 such shapes of 512 tokens, and among
// the first six of 95%.
constexpr uint64_t usual_outs[] = {1024, 1536, 2048, 2816,  3072,  4096,  5120,
                                   5504, 6912, 8192, 11008, 13824, 14336, 28672};
constexpr uint64_t usual_inputs[] = {4096, 11008};
constexpr uint64_t usual_tokens[] = {32, 64, 128, 256, 512}; // others take the kernel of the next of them
// A kernel is loaded by a product of at most so many outputs, tokens and inputs.
constexpr uint64_t most_outs = 1024, most_tokens = 256, most_inputs = 256;
constexpr uint64_t w_bytes = most_outs * most_inputs * 2, x_bytes = most_tokens * most_inputs * 2,
                   out_bytes = most_outs * most_tokens * 4, workspace_bytes = 8u << 20;

std::atomic<bool> has_failed = false; // where nothing asked for it

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

uint64_t usual_tokens_of(uint64_t n_tokens) {
    const auto *next = std::lower_bound(std::begin(usual_tokens), std::end(usual_tokens), n_tokens);
    return next == std::end(usual_tokens) ? n_tokens : *next;
}

void require_success(int status, const char *what) {
    if (status != 0)
        throw Failure{PI_FAILURE,
                      std::string(what) + ": cuBLASLt failed with status " + std::to_string(status)};
}

} // namespace

struct CublasLt::Way {
    Way(const CublasLtLibrary &with, const Shape &shape) : library(with) {
        check(library.make_operation(&operation, compute_float32, type_float32));
        const int32_t transpose = shape.transposed ? 0 : 1;
        check(library.set_operation(operation, attribute_transpose_a, &transpose, sizeof transpose));
        const uint64_t rows = shape.transposed ? shape.n_out : shape.n_k,
                       columns = shape.transposed ? shape.n_k : shape.n_out;
        check(library.make_layout(&a, type_float16, rows, columns, static_cast<int64_t>(shape.w_stride)));
        check(library.make_layout(&b, type_float16, shape.n_k, shape.n_tokens,
                                  static_cast<int64_t>(shape.x_stride)));
        check(library.make_layout(&d, type_float32, shape.n_out, shape.n_tokens,
                                  static_cast<int64_t>(shape.out_stride)));
    }
    ~Way() {
        if (operation != nullptr)
            library.destroy_operation(operation);
        for (void *layout : {a, b, d}) {
            if (layout != nullptr)
                library.destroy_layout(layout);
        }
    }
    Way(const Way &) = delete;
    Way &operator=(const Way &) = delete;

    static void check(int status) { require_success(status, "describing a product"); }

    const CublasLtLibrary &library;
    void *operation = nullptr, *a = nullptr, *b = nullptr, *d = nullptr;
    CublasLtAlgorithm algorithm{};
    bool known = false;
};

bool CublasLt::is_wanted() {
    const char *value = std::getenv("PI_GPU_GEMM");
    if (value == nullptr)
        return !has_failed && may_load_when_used() && has_cublaslt();
    if (std::string_view(value) != "own" && std::string_view(value) != "cublaslt")
        throw Failure{PI_USAGE, "PI_GPU_GEMM is neither own nor cublaslt"};
    return std::string_view(value) == "cublaslt";
}

void CublasLt::try_out(int ordinal) {
    try {
        static_cast<void>(CublasLt(ordinal));
    } catch (const Failure &) {
        if (std::getenv("PI_GPU_GEMM") != nullptr)
            throw;
        has_failed = true;
    }
}

CublasLt::CublasLt(int ordinal) : library_(cublaslt_library()) {
    require_success(library_.create(&handle_), "opening");
    try {
        kernels_ = &kernels_of(ordinal);
    } catch (...) {
        library_.destroy(handle_);
        throw;
    }
}

CublasLt::~CublasLt() {
    library_.destroy(handle_);
}

// Kernels stay with the context, which stays with the process.
const CublasLt::Kernels &CublasLt::kernels_of(int ordinal) const {
    static std::mutex mutex;
    static std::map<int, Kernels> loaded;
    const std::lock_guard lock(mutex);
    if (const auto known = loaded.find(ordinal); known != loaded.end())
        return known->second;
    return loaded[ordinal] = load_kernels();
}

CublasLt::Kernels CublasLt::load_kernels() const {
    void *memory = nullptr;
    check(cudaMalloc(&memory, w_bytes + x_bytes + out_bytes + workspace_bytes), "loading kernels");
    const std::unique_ptr<void, cudaError_t (*)(void *)> owner(memory, cudaFree);
    Kernels loaded;
    for (const bool transposed : {false, true}) {
        for (const uint64_t n_out : usual_outs) {
            for (const uint64_t n_k : usual_inputs) {
                for (const uint64_t n_tokens : usual_tokens)
                    load_best({transposed, false, n_out, n_tokens, n_k, transposed ? n_out : n_k, n_k, n_out,
                               workspace_bytes},
                              memory, loaded);
            }
        }
    }
    check(cudaStreamSynchronize(nullptr), "loading kernels");
    return loaded;
}

// The kernel that a product of this shape takes, adding or not, by a smaller one that takes it too. What is
// multiplied does not matter.
void CublasLt::load_best(const Shape &shape, void *memory, Kernels &loaded) const {
    const Way way(library_, shape);
    const std::vector<CublasLtFound> best = find(way, shape, 1);
    if (best.empty() || loaded.contains(kernel_of(best[0].algorithm, shape)))
        return;
    Shape small = shape;
    small.n_out = small.out_stride = std::min(shape.n_out, most_outs);
    small.n_tokens = std::min(shape.n_tokens, most_tokens);
    small.n_k = small.x_stride = std::min(shape.n_k, most_inputs);
    small.w_stride = shape.transposed ? small.n_out : small.n_k;
    const Way small_way(library_, small);
    auto *w = static_cast<uint8_t *>(memory), *x = w + w_bytes, *out = x + x_bytes;
    for (const bool accumulate : {false, true}) {
        small.accumulate = accumulate;
        if (multiply(small_way, small, best[0].algorithm, w, x, out, out + out_bytes, nullptr) == 0)
            loaded.insert(kernel_of(best[0].algorithm, small));
    }
}

CublasLt::Kernel CublasLt::kernel_of(const CublasLtAlgorithm &algorithm, const Shape &shape) const {
    Kernel out{shape.transposed, shape.accumulate};
    for (int attribute = 0; attribute < n_algorithm_attributes; ++attribute) {
        const size_t n_bytes = attribute < first_short_attribute ? 4 : 2;
        size_t n_written = 0;
        uint32_t &value = out[static_cast<size_t>(2 + attribute)];
        require_success(library_.describe(&algorithm, attribute, &value, n_bytes, &n_written),
                        "describing an algorithm");
        if (attribute == attribute_splits)
            value = value > 1 ? 1 : 0; // how many is an argument
    }
    return out;
}

// The best of all algorithms for a shape first.
std::vector<CublasLtFound> CublasLt::find(const Way &way, const Shape &shape, int n) const {
    void *preference = nullptr;
    constexpr const char *what = "choosing an algorithm";
    require_success(library_.make_preference(&preference), what);
    const std::unique_ptr<void, int (*)(void *)> owner(preference, library_.destroy_preference);
    require_success(library_.set_preference(preference, preference_workspace, &shape.workspace_bytes,
                                            sizeof shape.workspace_bytes),
                    what);
    for (const int attribute : preference_alignments)
        require_success(
            library_.set_preference(preference, attribute, &alignment_bytes, sizeof alignment_bytes), what);
    std::vector<CublasLtFound> found(static_cast<size_t>(n));
    int n_found = 0;
    const int status = library_.find(handle_, way.operation, way.a, way.b, way.d, way.d, preference, n,
                                     found.data(), &n_found);
    found.resize(status == 0 ? static_cast<size_t>(n_found) : 0);
    std::erase_if(found, [](const CublasLtFound &one) { return one.status != 0; });
    return found;
}

bool CublasLt::is_usable(const Way &way, const Shape &shape, const CublasLtAlgorithm &algorithm) const {
    CublasLtFound checked{};
    return kernels_->contains(kernel_of(algorithm, shape)) &&
           library_.check(handle_, way.operation, way.a, way.b, way.d, way.d, &algorithm, &checked) == 0 &&
           checked.workspace_bytes <= shape.workspace_bytes;
}

int CublasLt::multiply(const Way &way, const Shape &shape, const CublasLtAlgorithm &algorithm, const void *w,
                       const void *x, void *out, void *workspace, cudaStream_t stream) const {
    const float alpha = 1.0f, beta = shape.accumulate ? 1.0f : 0.0f;
    return library_.multiply(handle_, way.operation, &alpha, w, way.a, x, way.b, &beta, out, way.d, out,
                             way.d, &algorithm, workspace, shape.workspace_bytes, stream);
}

// Rows of w and x are columns to cuBLASLt, which computes out^T [n_out, n_tokens] = w x^T.
const CublasLt::Way &CublasLt::way_of(const Shape &shape) {
    if (const auto known = ways_.find(shape); known != ways_.end())
        return known->second;
    if (ways_.size() >= most_shapes)
        ways_.clear();
    Way &way = ways_.try_emplace(shape, library_, shape).first->second;
    Shape usual = shape;
    usual.n_tokens = usual_tokens_of(shape.n_tokens);
    for (const CublasLtFound &one : find(Way(library_, usual), usual, n_candidates)) {
        way.known = is_usable(way, shape, one.algorithm);
        way.algorithm = one.algorithm;
        if (way.known)
            break;
    }
    return way;
}

bool CublasLt::run(pi_gpu &gpu, const Gemm &work) {
    const Shape shape = {
        work.transposed, work.accumulate, work.n_out,
        work.x.n_tokens, work.n_k,        work.w_stride,
        work.x.n_k,      work.out_stride, std::min<uint64_t>(gpu.partials.n_bytes, workspace_bytes)};
    const Way &way = way_of(shape);
    if (!way.known)
        return false;
    if (work.accumulate)
        launch("scaling sums", gpu, unscale_kernel, work.x.n_tokens, 256, 0, work);
    require_success(multiply(way, shape, way.algorithm, work.w, work.x.data + work.k_begin, work.out,
                             gpu.partials.data, gpu.stream),
                    "a product");
    ++gpu.n_launches;
    launch("finishing a product", gpu, finish_kernel, work.x.n_tokens, 256, 0, work);
    return true;
}

} // namespace pi_cuda
