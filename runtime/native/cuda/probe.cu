// probe.cu: how fast the device reads its own memory, and the host's.
#include "memory.h"
#include "operations.h"
#include "types.cuh"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

namespace pi_cuda {
namespace {

constexpr unsigned threads = 512;
constexpr uint64_t unit_bytes = 1u << 20;
constexpr uint32_t at_once = 8;        // loads that a thread has on their way
constexpr uint32_t device_sweeps = 16; // of a pass: much longer than a launch takes
constexpr uint32_t host_sweeps = 2;
constexpr int least_passes = 3;

// data [n]; n a multiple of at_once. The sum is written, so that nothing is left out.
__global__ void read_kernel(const uint4 *data, uint64_t n, uint32_t n_sweeps, uint32_t *out) {
    const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
    const uint64_t first = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    uint32_t sum = 0;
    for (uint32_t sweep = 0; sweep < n_sweeps; ++sweep) {
        for (uint64_t i = first; i < n; i += at_once * stride) {
            uint4 piece[at_once];
#pragma unroll
            for (uint32_t j = 0; j < at_once; ++j)
                piece[j] = read<uint4>(reinterpret_cast<const uint8_t *>(data + min(i + j * stride, n - 1)));
#pragma unroll
            for (uint32_t j = 0; j < at_once; ++j)
                sum += piece[j].x ^ piece[j].y ^ piece[j].z ^ piece[j].w;
        }
    }
    out[first] = sum;
}

double pass_seconds(pi_gpu &gpu, const uint4 *data, uint64_t n_bytes, uint32_t n_sweeps, unsigned grid,
                    uint32_t *out) {
    const auto start = std::chrono::steady_clock::now();
    launch("reading memory", gpu, read_kernel, grid, threads, 0, data, n_bytes / sizeof(uint4), n_sweeps,
           out);
    check(cudaStreamSynchronize(gpu.stream), "reading memory");
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

uint64_t fastest(pi_gpu &gpu, const uint4 *data, uint64_t n_bytes, uint32_t n_sweeps, float min_seconds,
                 uint32_t *out, unsigned grid) {
    double best = INFINITY, all = 0;
    pass_seconds(gpu, data, n_bytes, 1, grid, out); // wakes the clocks
    for (int i = 0; i < least_passes || all < static_cast<double>(min_seconds); ++i) {
        const double seconds = pass_seconds(gpu, data, n_bytes, n_sweeps, grid, out);
        best = std::min(best, seconds);
        all += seconds;
    }
    return static_cast<uint64_t>(static_cast<double>(n_bytes * n_sweeps) / best);
}

} // namespace

int32_t measure_read(pi_gpu *gpu, uint32_t from_host, uint64_t n_bytes, float min_seconds,
                     uint64_t *bytes_per_second) {
    return operate(gpu, [&](pi_gpu &device) {
        require_no_capture(device, "measuring");
        n_bytes = n_bytes / unit_bytes * unit_bytes;
        if (n_bytes == 0)
            throw Failure{PI_USAGE, "at least 1 MiB is read"};
        const unsigned grid = 4 * static_cast<unsigned>(device.n_processors);
        const auto release = [&](void *data) { device.arena->release(data); };
        const auto allocate = [&](uint64_t n) {
            return std::unique_ptr<void, decltype(release)>(device.arena->allocate(n, device.memory_bytes()),
                                                            release);
        };
        const auto out = allocate(uint64_t{grid} * threads * sizeof(uint32_t));
        auto *sums = static_cast<uint32_t *>(out.get());
        if (from_host == 0) {
            const auto data = allocate(n_bytes);
            check(cudaMemsetAsync(data.get(), 0, n_bytes, device.stream), "clearing device memory");
            *bytes_per_second = fastest(device, static_cast<const uint4 *>(data.get()), n_bytes,
                                        device_sweeps, min_seconds, sums, grid);
            return;
        }
        void *pinned = nullptr;
        check(cudaHostAlloc(&pinned, n_bytes, cudaHostAllocMapped), "pinning host memory");
        const std::unique_ptr<void, cudaError_t (*)(void *)> owner(pinned, cudaFreeHost);
        std::memset(pinned, 0, n_bytes);
        void *mapped = nullptr;
        check(cudaHostGetDevicePointer(&mapped, pinned, 0), "mapping host memory");
        *bytes_per_second = fastest(device, static_cast<const uint4 *>(mapped), n_bytes, host_sweeps,
                                    min_seconds, sums, grid);
    });
}

} // namespace pi_cuda
