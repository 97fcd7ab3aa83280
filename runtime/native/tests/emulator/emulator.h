// emulator.h: as much of CUDA as the device library uses, on the CPU, so that its kernels can be tested where
// no GPU is. A block's threads are fibers that switch at barriers and warp functions; a thread of its own
// does the queued work once the program asks for it, as late as a device may begin.
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static // one block runs at a time
#define __launch_bounds__(...)
#define __grid_constant__
#define PI_SHARED(T, name) T *name = static_cast<T *>(emulator::dynamic_shared())

struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct dim3 {
    uint32_t x, y, z;
    dim3(uint32_t with_x = 1, uint32_t with_y = 1, uint32_t with_z = 1) : x(with_x), y(with_y), z(with_z) {}
};
struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

void *dynamic_shared();
// Every lane of the warp hands in n bytes and gets those of all lanes, [32] values.
const uint8_t *exchange(const void *value, size_t n_bytes);
void barrier();
void queue(std::function<void()> work);
void refuse_launch(); // the next cudaGetLastError tells
void flush_queue();   // what is queued may begin, on a thread of its own
void run_queue();     // until all is done
void run_blocks(dim3 grid, dim3 block, const std::function<void()> &thread);

float from_half(uint16_t bits);
uint16_t to_half(float x);

template <typename T>
T from_lane(T value, int lane) {
    T out;
    std::memcpy(&out, exchange(&value, sizeof value) + sizeof(T) * static_cast<size_t>(lane & 31),
                sizeof out);
    return out;
}

inline int lane() {
    return static_cast<int>(threadIdx.x % 32);
}

} // namespace emulator

using std::max;
using std::min;

inline void __threadfence() {}
inline void __syncthreads() {
    emulator::barrier();
}
inline void __syncwarp() {
    const uint8_t nothing = 0;
    emulator::exchange(&nothing, 1);
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
    return emulator::from_lane(value, emulator::lane() ^ mask);
}
template <typename T>
T __shfl_sync(uint32_t, T value, int lane) {
    return emulator::from_lane(value, lane);
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, uint32_t delta) {
    const int from = emulator::lane() - static_cast<int>(delta);
    return emulator::from_lane(value, from < 0 ? emulator::lane() : from);
}
inline uint32_t __ballot_sync(uint32_t, bool bit) {
    const uint8_t one = bit ? 1 : 0;
    const uint8_t *all = emulator::exchange(&one, 1);
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i)
        bits |= static_cast<uint32_t>(all[i]) << i;
    return bits;
}

template <typename T>
T __ldg(const T *p) {
    if (reinterpret_cast<uintptr_t>(p) % sizeof(T) != 0)
        __builtin_trap(); // a device reads aligned values only
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}
template <typename T>
T __ldcv(const T *p) {
    return __ldg(p);
}
template <typename T>
T __ldcg(const T *p) {
    return __ldg(p);
}
inline void __threadfence_system() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
}
inline int __popc(uint32_t bits) {
    return __builtin_popcount(bits);
}
inline int __ffs(int bits) {
    return __builtin_ffs(bits);
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; ++i)
        out |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xff) << (8 * i);
    return out;
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i)
        c += static_cast<int8_t>(a >> (8 * i)) * static_cast<int8_t>(b >> (8 * i));
    return c;
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline int __float2int_rn(float x) {
    return x == x ? static_cast<int>(std::nearbyint(x)) : 0;
}
inline float __uint_as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline __half __ushort_as_half(uint16_t bits) {
    return {bits};
}
inline float __half2float(__half x) {
    return emulator::from_half(x.bits);
}
inline __half __float2half_rn(float x) {
    return {emulator::to_half(x)};
}
inline __half2 __floats2half2_rn(float x, float y) {
    return {__float2half_rn(x), __float2half_rn(y)};
}
template <typename T>
T atomicAdd(T *to, T x) {
    const T before = *to;
    *to += x;
    return before;
}
template <typename T>
T atomicOr(T *to, T x) {
    const T before = *to;
    *to |= x;
    return before;
}
template <typename T>
T atomicMin(T *to, T x) {
    const T before = *to;
    *to = std::min(*to, x);
    return before;
}

// ---- runtime
// --------------------------------------------------------------------------------------------------

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNotReady = 600,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
enum cudaMemcpyKind { cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum {
    cudaStreamNonBlocking = 1,
    cudaEventDisableTiming = 2,
    cudaHostAllocMapped = 2,
    cudaHostAllocWriteCombined = 4
};
using cudaStream_t = struct emulated_stream *;
using cudaEvent_t = struct emulated_event *;
using cudaGraph_t = struct emulated_graph *;
using cudaGraphExec_t = struct emulated_graph *;
struct cudaDeviceProp {
    char name[256];
    int multiProcessorCount, major, minor;
    size_t sharedMemPerBlockOptin;
};

const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError(); // and forgets it
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaSetDevice(int ordinal);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int ordinal);
cudaError_t cudaDeviceGetPCIBusId(char *out, int n, int ordinal);
enum cudaDeviceAttr { cudaDevAttrKernelExecTimeout = 17 };
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int ordinal);
struct cudaFuncAttributes {
    int ptxVersion;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *) {
    out->ptxVersion = 90;
    return cudaSuccess;
}
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9 };
inline cudaError_t cudaFuncSetAttribute(const void *, int, int value) { // bytes, or a share
    return value <= 100 << 10 ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaMalloc(void **out, size_t n_bytes);
cudaError_t cudaFree(void *data);
cudaError_t cudaMallocHost(void **out, size_t n_bytes);
cudaError_t cudaFreeHost(void *data);
cudaError_t cudaHostAlloc(void **out, size_t n_bytes, unsigned flags);
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t n_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *data, int value, size_t n_bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out);
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphUpload(cudaGraphExec_t graph, cudaStream_t stream);
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph);

namespace pi_cuda {

uint64_t global_time_ns();
inline void wait_for_previous() {}
inline void let_next_begin() {}
void be_patient(); // gives its turn to the program's threads

// A value that another thread writes and reads: one access of 16 bytes.
using Whole = uint32_t __attribute__((vector_size(16)));
inline uint4 load_whole(const void *at) {
    const Whole x = *static_cast<const volatile Whole *>(at);
    return {x[0], x[1], x[2], x[3]};
}
inline void store_whole(void *at, uint4 x) {
    *static_cast<volatile Whole *>(at) = Whole{x.x, x.y, x.z, x.w};
}

template <typename... Params, typename... Args>
void start_kernel(void (*kernel)(Params...), dim3 grid, dim3 block, size_t, cudaStream_t, bool,
                  Args... args) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) // a device starts no kernel without blocks
        return emulator::refuse_launch();
    std::tuple<Params...> values(static_cast<Params>(args)...);
    emulator::queue([=] { emulator::run_blocks(grid, block, [&] { std::apply(kernel, values); }); });
}

// Copies into shared memory, done no earlier than they must be: mma.cuh.
void copy_async(__half *shared, const __half *global, bool inside);
void commit_copies();
void wait_for_groups(size_t n_left);
template <int n>
void wait_for_copies() {
    wait_for_groups(n);
}

// The matrix units, as mma.cuh describes them.
inline void load_any(const __half *row, uint32_t (&out)[4], bool transposed) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
        __builtin_trap();
    const __half *rows[32];
    std::memcpy(rows, emulator::exchange(&row, sizeof row), sizeof rows);
    const int g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int m = 0; m < 4; ++m) {
        const __half a = transposed ? rows[8 * m + 2 * t][g] : rows[8 * m + g][2 * t];
        const __half b = transposed ? rows[8 * m + 2 * t + 1][g] : rows[8 * m + g][2 * t + 1];
        out[m] = a.bits | static_cast<uint32_t>(b.bits) << 16;
    }
}
inline void load_matrices(const __half *row, uint32_t (&out)[4]) {
    load_any(row, out, false);
}
inline void load_transposed(const __half *row, uint32_t (&out)[4]) {
    load_any(row, out, true);
}
inline void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    uint32_t all[32][6];
    std::memcpy(all, emulator::exchange(mine, sizeof mine), sizeof all);
    const auto part = [](uint32_t pair, int i) {
        return emulator::from_half(static_cast<uint16_t>(pair >> (16 * i) & 0xffff));
    };
    const int g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int e = 0; e < 4; ++e) {
        const int row = g + e / 2 * 8, column = 2 * t + e % 2;
        for (int k = 0; k < 16; ++k) {
            const uint32_t *of_a = all[row % 8 * 4 + k % 8 / 2], *of_b = all[column * 4 + k % 8 / 2];
            c[e] += part(of_a[k / 8 * 2 + row / 8], k % 2) * part(of_b[4 + k / 8], k % 2);
        }
    }
}
inline void multiply_add(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
    uint32_t all[32][6];
    std::memcpy(all, emulator::exchange(mine, sizeof mine), sizeof all);
    const int g = emulator::lane() / 4, t = emulator::lane() % 4;
    for (int e = 0; e < 4; ++e) {
        const int row = g + e / 2 * 8, column = 2 * t + e % 2;
        for (int k = 0; k < 8; ++k) // words of four
            c[e] = __dp4a(static_cast<int>(all[row % 8 * 4 + k % 4][k / 4 * 2 + row / 8]),
                          static_cast<int>(all[column * 4 + k % 4][4 + k / 4]), c[e]);
    }
}

} // namespace pi_cuda
