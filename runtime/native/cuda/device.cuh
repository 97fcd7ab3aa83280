// device.cuh: an open device as the library's own files see it.
#pragma once

#include "gpu.h"
#include "kernels/kernels.h"
#include "pi.h"
#include "pi_gpu.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace pi_cuda {

class Arena;
class CublasLt;

// A failure on its way to the caller: status and text, turned into a return value by guarded().
struct Failure {
    int32_t status;
    std::string text;
};

// Throws Failure unless the call succeeded; `what` is what was tried.
void check(cudaError_t result, const char *what);
void set_error(const std::string &text);

template <typename Function>
int32_t guarded(Function &&function) noexcept {
    try {
        function();
        return PI_OK;
    } catch (const Failure &failure) {
        set_error(failure.text);
        return failure.status;
    } catch (...) {
        set_error("out of host memory");
        return PI_DOES_NOT_FIT;
    }
}

// Device scratch that grows to the largest request; freed with the device. Not for use across operations.
struct Scratch {
    void *data = nullptr;
    uint64_t n_bytes = 0;
};

} // namespace pi_cuda

struct pi_gpu {
    int ordinal = 0;
    int n_processors = 0;
    int capability = 0;
    uint32_t shared_bytes = 0; // that a block may have
    bool overlaps = false;     // kernels may begin before the one ahead has ended: launch_early()
    bool rows_arrive = false;  // since the last of those
    std::string name;
    uint64_t budget_bytes = 0;
    uint64_t context_bytes = 0;
    cudaStream_t stream = nullptr;
    pi_cuda::Arena *arena = nullptr;
    pi_cuda::CublasLt *cublaslt = nullptr; // for large products; null: the kernels here

    static constexpr uint64_t staging_bytes = 16u << 20;
    void *staging[2] = {}; // pinned host memory
    cudaEvent_t staged[2] = {};
    int next_staging = 0;

    // Weights that are only there for a step come on a queue of their own: bring().
    static constexpr uint32_t n_slots = 2;
    cudaStream_t arrivals = nullptr;
    cudaEvent_t brought[n_slots] = {};
    cudaEvent_t apart = nullptr; // what came last is no longer needed as it came

    // Downloads land in pinned memory, which a device writes without a driver's copies between; synchronize()
    // hands them on.
    struct Landed {
        const void *from;
        void *to;
        uint64_t n_bytes;
    };
    static constexpr uint64_t landing_bytes = 2u << 20;
    uint8_t *landing = nullptr;
    uint64_t landing_used = 0;
    std::vector<Landed> landed;

    pi_cuda::Scratch partials; // of split attention, or of split accumulation
    pi_cuda::Scratch halves;   // activations of a matrix product as float16, with their scales
    pi_cuda::Scratch tile;     // rows of a matrix as float16, or as the file has them
    pi_cuda::Scratch done;     // blocks that are done, zero between operations

    bool capturing = false;
    uint64_t n_launches = 0;
    uint64_t launches_before = 0; // what is being captured
    uint64_t n_graphs = 0;        // they hold addresses: scratch must not move
    uint64_t graph_bytes = 0;
    uint64_t graph_limit_bytes = 0; // kept for them, of the budget

    uint64_t memory_bytes() const { return budget_bytes - context_bytes - graph_limit_bytes; }
};

namespace pi_cuda {

// At least n elements; contents are not kept.
void *scratch(pi_gpu &gpu, Scratch &which, uint64_t n_bytes);

template <typename T>
T *scratch_of(pi_gpu &gpu, Scratch &which, uint64_t n) {
    return static_cast<T *>(scratch(gpu, which, n * sizeof(T)));
}

// Runs an operation on the device; its failure becomes the return value.
template <typename Function>
int32_t operate(pi_gpu *gpu, Function &&function) noexcept {
    return guarded([&] {
        check(cudaSetDevice(gpu->ordinal), "choosing the device");
        function(*gpu);
    });
}

// Throws Failure while a graph is recorded: what waits, or moves memory, is no part of one.
inline void require_no_capture(const pi_gpu &gpu, const char *what) {
    if (gpu.capturing)
        throw Failure{PI_FAILURE, std::string(what) + " while a graph is being recorded"};
}

inline unsigned ceil_div(uint64_t a, uint64_t b) {
    return static_cast<unsigned>((a + b - 1) / b);
}

constexpr uint32_t max_counters = 16384;
// Zeros, for is_last_block.
uint32_t *counters(pi_gpu &gpu, uint32_t n);

constexpr int warp_size = 32;

#if defined(__CUDACC__) || defined(PI_GPU_EMULATED)
// More than 48 KiB must be asked for, of which a kernel's fixed arrays take some.
constexpr size_t most_unasked_shared_bytes = 24u << 10;

template <typename... Params, typename... Args>
void launch_as(bool early, const char *what, pi_gpu &gpu, void (*kernel)(Params...), dim3 grid, dim3 block,
               size_t shared_bytes, Args... args) {
    if (shared_bytes > most_unasked_shared_bytes)
        check(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shared_bytes)),
              what);
    start_kernel(kernel, grid, block, shared_bytes, gpu.stream, early, args...);
    check(cudaGetLastError(), what);
    ++gpu.n_launches;
}

// Of a processor's memory that is a cache otherwise, in percent. A processor must be empty to change it, so
// it is the same for all kernels that may begin beside another; two blocks of any of them fit.
constexpr int shared_percent = 72;

// Queues a kernel; `what` names it in the failure.
template <typename... Params, typename... Args>
void launch(const char *what, pi_gpu &gpu, void (*kernel)(Params...), dim3 grid, dim3 block,
            size_t shared_bytes, Args... args) {
    launch_as(false, what, gpu, kernel, grid, block, shared_bytes, args...);
}

// A kernel that calls wait_for_previous(), and reads rows before: they must not be those that the kernel
// ahead takes apart.
template <typename... Params, typename... Args>
void launch_early(const char *what, pi_gpu &gpu, void (*kernel)(Params...), dim3 grid, dim3 block,
                  size_t shared_bytes, Args... args) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                               cudaFuncAttributePreferredSharedMemoryCarveout, shared_percent),
          what);
    launch_as(gpu.overlaps && !std::exchange(gpu.rows_arrive, false), what, gpu, kernel, grid, block,
              shared_bytes, args...);
}

// Whether n - 1 blocks have come here before with this counter, whose writes this one then sees. For all
// threads of a block; the counter is zero again after the last.
__device__ inline bool is_last_block(uint32_t *n_done, uint32_t n) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(n_done, 1u) == n - 1;
        if (last)
            *n_done = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

__device__ inline float warp_sum(float x) {
    for (int offset = warp_size / 2; offset > 0; offset /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ inline float warp_max(float x) {
    for (int offset = warp_size / 2; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Lanes `other` apart and less, down to row_lanes, add their 2 n sums: each lane keeps some of them, from
// `column` on.
template <int n, uint32_t other, uint32_t row_lanes>
__device__ __forceinline__ void merge_lanes(float *sum, uint32_t &column) {
    if constexpr (other >= row_lanes) {
        const bool upper = (threadIdx.x & other) != 0;
#pragma unroll
        for (int j = 0; j < n; ++j) {
            const float mine = upper ? sum[n + j] : sum[j], theirs = upper ? sum[j] : sum[n + j];
            sum[j] = mine + __shfl_xor_sync(0xffffffffu, theirs, static_cast<int>(other));
        }
        column += upper ? static_cast<uint32_t>(n) : 0;
        merge_lanes<n / 2, other / 2, row_lanes>(sum, column);
    }
}

// Sum over n parts, in order, of factor_of(part) * parts[stride * part], what other blocks wrote. Eight loads
// are on their way together, which a loop that may end at each of them would not allow.
template <typename FactorOf>
__device__ __forceinline__ float sum_of_parts(const float *parts, uint32_t n, uint32_t stride,
                                              const FactorOf &factor_of) {
    constexpr uint32_t at_once = 8;
    float total = 0;
    for (uint32_t begin = 0; begin < n; begin += at_once) {
        float part[at_once];
#pragma unroll
        for (uint32_t j = 0; j < at_once; ++j)
            part[j] = __ldcg(parts + uint64_t{stride} * min(begin + j, n - 1));
#pragma unroll
        for (uint32_t j = 0; j < at_once; ++j)
            total += begin + j < n ? factor_of(min(begin + j, n - 1)) * part[j] : 0.0f;
    }
    return total;
}

// With e = exp(-|g|) <= 1 nothing overflows on either side of zero.
__device__ __forceinline__ float silu(float g) {
    const float e = expf(-fabsf(g));
    return g * (g < 0 ? e : 1.0f) / (1.0f + e);
}

// Sum over a block of at most 1024 threads (whole warps), for every thread; `shared` has 32 floats.
__device__ inline float block_sum(float x, float *shared) {
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    x = warp_sum(x);
    __syncthreads(); // a sum before this one may still be read
    if (lane == 0)
        shared[warp] = x;
    __syncthreads();
    const int n_warps = blockDim.x / warp_size;
    return warp_sum(lane < n_warps ? shared[lane] : 0.0f);
}

__device__ inline float block_max(float x, float *shared) {
    const int lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0)
        shared[warp] = x;
    __syncthreads();
    const int n_warps = blockDim.x / warp_size;
    return warp_max(lane < n_warps ? shared[lane] : -INFINITY);
}
#endif

} // namespace pi_cuda
