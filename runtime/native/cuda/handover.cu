// handover.cu: a layer that two sides compute. The device posts what the CPU needs to host memory and later
// adds what the CPU answers to its own shares. Flags hold a value that goes up from one exchange to the next,
// so that none is ever reset; *base is written before a step, so that a graph can be replayed.
#include "device.cuh"
#include "operations.h"
#include "wait_value.h"

#include <algorithm>

namespace pi_cuda {
namespace {

constexpr unsigned post_threads = 512, merge_threads = 256;
constexpr uint32_t merge_floats = 4 * merge_threads; // of a block and a turn
constexpr unsigned most_merge_blocks = 512;

// 16 bytes a thread and turn; all blocks together copy everything.
__device__ void copy_out(const float *from, uint64_t n, float *to) {
    for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n / 4;
         i += uint64_t{gridDim.x} * blockDim.x)
        reinterpret_cast<float4 *>(to)[i] = reinterpret_cast<const float4 *>(from)[i];
}

__global__ void post_kernel(const __grid_constant__ pi_gpu_post work) {
    copy_out(work.x, uint64_t{work.n_tokens} * work.n_embd, work.x_out);
    for (uint32_t t = 0; t < work.n_tokens; ++t) {
        for (uint32_t w = blockIdx.x * blockDim.x + threadIdx.x; w < work.mask_words;
             w += gridDim.x * blockDim.x)
            work.mask_out[uint64_t{work.mask_out_stride} * t + w] =
                work.mask[uint64_t{work.mask_stride} * t + w];
    }
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    if (work.stamp != nullptr && blockIdx.x == 0)
        *work.stamp = global_time_ns();
    __threadfence_system(); // the block's part is there before its flag
    *static_cast<volatile uint32_t *>(work.flags + PI_GPU_FLAG_STRIDE * blockIdx.x) = *work.base + work.order;
}

// Whether the CPU has answered; false: the step is given up, here or in an earlier layer.
__device__ bool await_answer(const pi_gpu_merge &work) {
    const uint32_t value = *work.base + work.order;
    if (*static_cast<volatile uint32_t *>(work.given_up) != 0)
        return false;
    const uint64_t begin = global_time_ns();
    for (;;) {
        const uint64_t mail = *static_cast<const volatile uint64_t *>(work.mail); // one read over the bus
        if (static_cast<uint32_t>(mail) == value)
            break;
        const bool late = global_time_ns() - begin > work.limit_ns;
        if (late)
            *static_cast<volatile uint32_t *>(work.late) = value;
        if (late || mail >> 32 != 0) {
            *static_cast<volatile uint32_t *>(work.given_up) = 1;
            return false;
        }
        be_patient();
    }
    __threadfence_system(); // the answer is read after its flag
    return true;
}

__global__ void merge_kernel(const __grid_constant__ pi_gpu_merge work) {
    __shared__ uint32_t ready;
    if (threadIdx.x == 0)
        ready = work.answer == nullptr || await_answer(work) ? 1 : 0;
    __syncthreads();
    if (work.stamp != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
        *work.stamp = global_time_ns();
    if (ready == 0)
        return;
    for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < work.n / 4;
         i += uint64_t{gridDim.x} * blockDim.x) {
        float4 sum = {0, 0, 0, 0};
        for (const float *part : {work.share[0], work.share[1]}) {
            if (part == nullptr)
                continue;
            const float4 x = reinterpret_cast<const float4 *>(part)[i];
            sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
        }
        if (work.answer != nullptr) {
            const float4 x = __ldcv(reinterpret_cast<const float4 *>(work.answer) + i); // never cached
            sum = {sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w};
        }
        float4 &y = reinterpret_cast<float4 *>(work.y)[i];
        y = {y.x + sum.x, y.y + sum.y, y.z + sum.z, y.w + sum.w};
    }
}

__global__ void stamp_kernel(uint64_t *at) {
    if (threadIdx.x == 0)
        *at = global_time_ns();
}

} // namespace

int32_t allocate_host(pi_gpu *gpu, uint64_t n_bytes, void **host, void **device) {
    return operate(gpu, [&](pi_gpu &) {
        *host = *device = nullptr;
        if (n_bytes == 0)
            return; // where nothing is, nothing can be mapped
        void *data = nullptr;
        check(cudaHostAlloc(&data, n_bytes, cudaHostAllocMapped), "pinning host memory");
        const cudaError_t mapped = cudaHostGetDevicePointer(device, data, 0);
        if (mapped != cudaSuccess)
            cudaFreeHost(data);
        check(mapped, "mapping host memory");
        *host = data;
    });
}

int32_t release_host(pi_gpu *gpu, void *host) {
    return operate(gpu, [&](pi_gpu &) {
        check(cudaStreamSynchronize(gpu->stream), "waiting for the device");
        check(cudaFreeHost(host), "releasing host memory");
    });
}

int32_t query(pi_gpu *gpu, uint32_t *busy) {
    return operate(gpu, [&](pi_gpu &) {
        const cudaError_t state = cudaStreamQuery(gpu->stream);
        *busy = state == cudaErrorNotReady ? 1 : 0;
        if (state != cudaErrorNotReady)
            check(state, "the device's work");
    });
}

// Where a display hangs on the device the driver ends kernels that take seconds.
int32_t waits(pi_gpu *gpu, uint32_t *spin, uint32_t *gate) {
    return operate(gpu, [&](pi_gpu &) {
        int ends_kernels = 0;
        check(cudaDeviceGetAttribute(&ends_kernels, cudaDevAttrKernelExecTimeout, gpu->ordinal),
              "asking for the limit of kernels");
        *spin = ends_kernels == 0 ? 1 : 0;
        *gate = can_wait_for_values() ? 1 : 0;
    });
}

int32_t post(pi_gpu *gpu, const pi_gpu_post *work) {
    return operate(gpu, [&](pi_gpu &device) {
        launch("posting to the CPU", device, post_kernel, work->n_blocks, post_threads, 0, *work);
    });
}

int32_t merge(pi_gpu *gpu, const pi_gpu_merge *work) {
    return operate(gpu, [&](pi_gpu &device) {
        const unsigned blocks = std::min(ceil_div(work->n, merge_floats), most_merge_blocks);
        if (work->gate != nullptr)
            wait_for_value(device.stream, work->gate, 1);
        launch("merging shares", device, merge_kernel, blocks, merge_threads, 0, *work);
    });
}

int32_t stamp(pi_gpu *gpu, uint64_t *at) {
    return operate(
        gpu, [&](pi_gpu &device) { launch("reading the clock", device, stamp_kernel, 1, warp_size, 0, at); });
}

} // namespace pi_cuda
