// device.cu: opening a device, its memory under the budget, copies, and how failures are told.
#include "cublaslt.h"
#include "device.cuh"
#include "loading.h"
#include "memory.h"
#include "operations.h"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace pi_cuda {
namespace {

thread_local std::string last_error;

// Held for the context where it cannot be measured: 0.53 GiB on an H200, with room for other drivers.
constexpr uint64_t context_reserve_bytes = 640u << 20;
// For what cuBLASLt allocates when it is used: 2 MiB at a time, 4 in all of 176 shapes, loading kernels
// included.
constexpr uint64_t library_reserve_bytes = 8u << 20;
// For streams, events and the mapping of pinned memory, which come after the context: 3 MiB on an H200 with
// one stream.
constexpr uint64_t handles_bytes = 6u << 20;
constexpr uint64_t smallest_context_bytes = 64u << 20; // less was measured: the context was there before
constexpr int min_capability = 75;

// What the device has in use, by all programs; 0 where the management library is missing.
class UsedMemory {
  public:
    explicit UsedMemory(int ordinal) {
        if (cudaDeviceGetPCIBusId(bus_, sizeof bus_, ordinal) != cudaSuccess)
            return;
        library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library_ == nullptr)
            return;
        const auto init = reinterpret_cast<int (*)()>(dlsym(library_, "nvmlInit_v2"));
        ready_ = init != nullptr && init() == 0;
    }
    ~UsedMemory() {
        if (library_ == nullptr)
            return;
        const auto shutdown = reinterpret_cast<int (*)()>(dlsym(library_, "nvmlShutdown"));
        if (ready_ && shutdown != nullptr)
            shutdown();
        dlclose(library_);
    }
    UsedMemory(const UsedMemory &) = delete;
    UsedMemory &operator=(const UsedMemory &) = delete;

    uint64_t n_bytes() const {
        if (!ready_)
            return 0;
        struct {
            unsigned long long total, free, used;
        } memory{};
        void *device = nullptr;
        const auto find = reinterpret_cast<int (*)(const char *, void **)>(
            dlsym(library_, "nvmlDeviceGetHandleByPciBusId_v2"));
        const auto read =
            reinterpret_cast<int (*)(void *, void *)>(dlsym(library_, "nvmlDeviceGetMemoryInfo"));
        if (find == nullptr || read == nullptr || find(bus_, &device) != 0 || read(device, &memory) != 0)
            return 0;
        return memory.used;
    }

  private:
    char bus_[32] = {};
    void *library_ = nullptr;
    bool ready_ = false;
};

// What the action adds to the memory in use; 0 where that cannot be measured.
template <typename Action>
uint64_t measured(int ordinal, const Action &action) {
    const UsedMemory memory(ordinal);
    const uint64_t before = memory.n_bytes();
    action();
    const uint64_t after = memory.n_bytes();
    return before != 0 && after > before ? after - before : 0;
}

// Makes the context with every kernel in it, so that nothing is loaded later, and returns what it takes.
uint64_t make_context(int ordinal) {
    static std::mutex mutex;
    static std::map<int, uint64_t> contexts, libraries;
    const std::lock_guard lock(mutex);
    const bool with_library = CublasLt::is_wanted();
    if (!contexts.contains(ordinal)) {
        const uint64_t n_bytes = measured(ordinal, [&] {
            check(cudaSetDevice(ordinal), "opening the device");
            check(cudaFree(nullptr), "making a CUDA context");
            if (with_library)
                load_own_kernels(); // else they come with the context
        });
        contexts[ordinal] =
            n_bytes < smallest_context_bytes ? context_reserve_bytes : n_bytes + handles_bytes;
    }
    check(cudaSetDevice(ordinal), "choosing the device");
    if (with_library && !libraries.contains(ordinal))
        libraries[ordinal] = library_reserve_bytes + measured(ordinal, [&] { CublasLt::try_out(ordinal); });
    return contexts[ordinal] + (with_library ? libraries[ordinal] : 0);
}

std::string mebibytes(uint64_t n_bytes) {
    return std::to_string((n_bytes + (1u << 20) - 1) >> 20) + " MiB";
}

void close_device(pi_gpu *gpu) {
    if (gpu == nullptr)
        return;
    cudaSetDevice(gpu->ordinal);
    if (gpu->stream != nullptr)
        cudaStreamSynchronize(gpu->stream);
    delete gpu->arena;
    delete gpu->cublaslt;
    for (int i = 0; i < 2; ++i) {
        if (gpu->staged[i] != nullptr)
            cudaEventDestroy(gpu->staged[i]);
        if (gpu->staging[i] != nullptr)
            cudaFreeHost(gpu->staging[i]);
    }
    if (gpu->arrivals != nullptr) {
        cudaStreamSynchronize(gpu->arrivals);
        cudaStreamDestroy(gpu->arrivals);
    }
    for (const cudaEvent_t event : {gpu->brought[0], gpu->brought[1], gpu->apart}) {
        if (event != nullptr)
            cudaEventDestroy(event);
    }
    if (gpu->landing != nullptr)
        cudaFreeHost(gpu->landing);
    if (gpu->stream != nullptr)
        cudaStreamDestroy(gpu->stream);
    delete gpu;
}

struct Close {
    void operator()(pi_gpu *gpu) const { close_device(gpu); }
};

__global__ void empty_kernel() {}

// Kernels wait for the one ahead (gpu.h) as they are compiled for 9.0 and newer devices only.
bool kernels_may_overlap() {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void *>(empty_kernel)),
          "asking for a kernel's version");
    const char *wanted = std::getenv("PI_GPU_OVERLAP");
    return attributes.ptxVersion >= 90 && (wanted == nullptr || std::strcmp(wanted, "0") != 0);
}

void describe(pi_gpu &gpu) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, gpu.ordinal), "asking for the device's properties");
    gpu.name = properties.name;
    gpu.n_processors = properties.multiProcessorCount;
    gpu.capability = 10 * properties.major + properties.minor;
    gpu.shared_bytes = static_cast<uint32_t>(properties.sharedMemPerBlockOptin);
    if (gpu.capability < min_capability)
        throw Failure{PI_FAILURE, gpu.name + " has compute capability " + std::to_string(properties.major) +
                                      "." + std::to_string(properties.minor) + ", at least 7.5 is needed"};
}

pi_gpu *open_device(uint32_t ordinal, uint64_t budget_bytes) {
    std::unique_ptr<pi_gpu, Close> gpu(new pi_gpu);
    gpu->ordinal = static_cast<int>(ordinal);
    choose_loading(CublasLt::is_wanted());
    describe(*gpu);
    gpu->context_bytes = make_context(gpu->ordinal);
    gpu->overlaps = kernels_may_overlap();
    size_t free_bytes = 0, total_bytes = 0;
    check(cudaMemGetInfo(&free_bytes, &total_bytes), "asking for free memory");
    gpu->budget_bytes = budget_bytes == 0 ? gpu->context_bytes + free_bytes : budget_bytes;
    if (gpu->budget_bytes <= gpu->context_bytes)
        throw Failure{PI_DOES_NOT_FIT, "the CUDA context alone takes " + mebibytes(gpu->context_bytes) +
                                           ", the budget is " + mebibytes(gpu->budget_bytes)};
    check(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking), "making a stream");
    gpu->cublaslt = CublasLt::is_wanted() ? new CublasLt(gpu->ordinal) : nullptr;
    gpu->arena = new Arena(gpu->ordinal, total_bytes);
    void *landing = nullptr;
    check(cudaMallocHost(&landing, pi_gpu::landing_bytes), "pinning host memory");
    gpu->landing = static_cast<uint8_t *>(landing);
    for (int i = 0; i < 2; ++i) {
        check(cudaMallocHost(&gpu->staging[i], pi_gpu::staging_bytes), "pinning host memory");
        check(cudaEventCreateWithFlags(&gpu->staged[i], cudaEventDisableTiming), "making an event");
        check(cudaEventCreateWithFlags(&gpu->brought[i], cudaEventDisableTiming), "making an event");
    }
    check(cudaEventCreateWithFlags(&gpu->apart, cudaEventDisableTiming), "making an event");
    check(cudaStreamCreateWithFlags(&gpu->arrivals, cudaStreamNonBlocking), "making a stream");
    return gpu.release();
}

} // namespace

void set_error(const std::string &text) {
    try {
        last_error = text;
    } catch (...) {
        last_error.clear();
    }
}

void check(cudaError_t result, const char *what) {
    if (result == cudaSuccess)
        return;
    const int32_t status = result == cudaErrorMemoryAllocation ? PI_DOES_NOT_FIT : PI_FAILURE;
    throw Failure{status, std::string(what) + ": " + cudaGetErrorString(result)};
}

void *scratch(pi_gpu &gpu, Scratch &which, uint64_t n_bytes) {
    if (n_bytes <= which.n_bytes)
        return which.data;
    require_no_capture(gpu, "taking scratch");
    if (gpu.n_graphs > 0)
        throw Failure{PI_FAILURE,
                      "an operation needs more scratch than was reserved before graphs were made"};
    check(cudaStreamSynchronize(gpu.stream), "waiting for the device"); // the old one may still be in use
    if (which.data != nullptr)
        gpu.arena->release(which.data);
    which = {};
    which.data = gpu.arena->allocate(n_bytes, gpu.memory_bytes());
    which.n_bytes = n_bytes;
    return which.data;
}

uint32_t *counters(pi_gpu &gpu, uint32_t n) {
    if (n > max_counters)
        throw Failure{PI_FAILURE, "an operation needs more counters than there are"};
    if (gpu.done.data == nullptr) {
        constexpr uint64_t n_bytes = max_counters * sizeof(uint32_t);
        scratch(gpu, gpu.done, n_bytes);
        check(cudaMemsetAsync(gpu.done.data, 0, n_bytes, gpu.stream), "clearing device memory");
    }
    return static_cast<uint32_t *>(gpu.done.data);
}

const char *error_text() {
    return last_error.c_str();
}

int32_t count_devices(uint32_t *n_devices) {
    return guarded([&] {
        int n = 0;
        choose_loading(CublasLt::is_wanted());
        check(cudaGetDeviceCount(&n), "looking for NVIDIA devices");
        *n_devices = static_cast<uint32_t>(n);
    });
}

int32_t open(uint32_t ordinal, uint64_t budget_bytes, pi_gpu **out) {
    return guarded([&] {
        *out = nullptr;
        *out = open_device(ordinal, budget_bytes);
    });
}

void close(pi_gpu *gpu) {
    close_device(gpu);
}

int32_t info(pi_gpu *gpu, pi_gpu_info *out) {
    return operate(gpu, [&](pi_gpu &) {
        size_t free_bytes = 0, total_bytes = 0;
        check(cudaMemGetInfo(&free_bytes, &total_bytes), "asking for free memory");
        *out = {};
        std::strncpy(out->name, gpu->name.c_str(), sizeof out->name - 1);
        out->capability = gpu->capability;
        out->n_processors = gpu->n_processors;
        out->total_bytes = total_bytes;
        out->free_bytes = free_bytes;
        out->context_bytes = gpu->context_bytes;
        out->mapped_bytes = gpu->arena->mapped_bytes();
        out->budget_bytes = gpu->budget_bytes;
        out->graph_limit_bytes = gpu->graph_limit_bytes;
        out->graph_bytes = gpu->graph_bytes;
        out->n_launches = gpu->n_launches;
    });
}

int32_t reserve(pi_gpu *gpu, uint64_t partials_bytes, uint64_t halves_bytes, uint64_t tile_bytes,
                uint64_t graphs_bytes) {
    return operate(gpu, [&](pi_gpu &device) {
        const uint64_t taken = device.context_bytes + device.arena->mapped_bytes();
        if (taken + graphs_bytes > device.budget_bytes)
            throw Failure{PI_DOES_NOT_FIT, "the budget leaves no " + mebibytes(graphs_bytes) + " for graphs"};
        device.graph_limit_bytes = graphs_bytes;
        scratch(device, device.partials, partials_bytes);
        scratch(device, device.halves, halves_bytes);
        scratch(device, device.tile, tile_bytes);
        counters(device, 0);
    });
}

int32_t allocate(pi_gpu *gpu, uint64_t n_bytes, void **out) {
    return operate(gpu, [&](pi_gpu &) {
        *out = nullptr;
        require_no_capture(*gpu, "allocating");
        *out = gpu->arena->allocate(n_bytes, gpu->memory_bytes());
    });
}

int32_t release(pi_gpu *gpu, void *data) {
    return guarded([&] {
        if (data == nullptr)
            return;
        require_no_capture(*gpu, "releasing memory");
        check(cudaSetDevice(gpu->ordinal), "choosing the device");
        check(cudaStreamSynchronize(gpu->stream), "waiting for the device");
        gpu->arena->release(data);
    });
}

// `to` may be host memory that the device sees.
void stage(pi_gpu &gpu, const void *host, uint64_t n_bytes, void *to) {
    require_no_capture(gpu, "uploading");
    const auto *from = static_cast<const uint8_t *>(host);
    for (uint64_t done = 0; done < n_bytes; done += pi_gpu::staging_bytes) {
        const uint64_t n = std::min(pi_gpu::staging_bytes, n_bytes - done);
        const int slot = gpu.next_staging;
        gpu.next_staging ^= 1;
        check(cudaEventSynchronize(gpu.staged[slot]), "waiting for a copy to the device");
        std::memcpy(gpu.staging[slot], from + done, n);
        check(cudaMemcpyAsync(static_cast<uint8_t *>(to) + done, gpu.staging[slot], n, cudaMemcpyDefault,
                              gpu.stream),
              "copying to the device");
        ++gpu.n_launches;
        check(cudaEventRecord(gpu.staged[slot], gpu.stream), "recording an event");
    }
}

int32_t upload(pi_gpu *gpu, const void *host, uint64_t n_bytes, void *to) {
    return operate(gpu, [&](pi_gpu &) { stage(*gpu, host, n_bytes, to); });
}

int32_t download(pi_gpu *gpu, const void *from, uint64_t n_bytes, void *host) {
    return operate(gpu, [&](pi_gpu &) {
        require_no_capture(*gpu, "downloading");
        void *to = host;
        if (n_bytes <= pi_gpu::landing_bytes - gpu->landing_used) {
            to = gpu->landing + gpu->landing_used;
            gpu->landed.push_back({to, host, n_bytes});
            gpu->landing_used += n_bytes;
        }
        check(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDeviceToHost, gpu->stream),
              "copying from the device");
        ++gpu->n_launches;
    });
}

int32_t copy(pi_gpu *gpu, const void *from, uint64_t n_bytes, void *to) {
    return operate(gpu, [&](pi_gpu &) {
        check(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDeviceToDevice, gpu->stream),
              "copying on the device");
        ++gpu->n_launches;
    });
}

int32_t zero(pi_gpu *gpu, void *data, uint64_t n_bytes) {
    return operate(gpu, [&](pi_gpu &) {
        check(cudaMemsetAsync(data, 0, n_bytes, gpu->stream), "clearing device memory");
        ++gpu->n_launches;
    });
}

int32_t synchronize(pi_gpu *gpu) {
    return operate(gpu, [&](pi_gpu &) {
        require_no_capture(*gpu, "synchronizing");
        const std::vector<pi_gpu::Landed> landed = std::exchange(gpu->landed, {});
        gpu->landing_used = 0;
        check(cudaStreamSynchronize(gpu->stream), "the device's work");
        for (const pi_gpu::Landed &one : landed)
            std::memcpy(one.to, one.from, one.n_bytes);
    });
}

} // namespace pi_cuda
