// gpu.h: the one way from the kernels to a vendor's headers: CUDA, or the emulator that runs kernels on the
// CPU in tests (PI_GPU_EMULATED).
#pragma once

#if defined(PI_GPU_EMULATED)
#include "emulator.h"
#else
#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// Dynamic shared memory of the block as an array of T.
#define PI_SHARED(T, name)                                                                                   \
    extern __shared__ uint4 pi_shared_memory[];                                                              \
    T *name = reinterpret_cast<T *>(pi_shared_memory)

namespace pi_cuda {

#ifdef __CUDACC__
// Each file's kernels are a module of their own, and one kernel leads to all of it: load_own_kernels().
struct FileKernels {
    explicit FileKernels(const void *one);

    const void *kernel;
    const FileKernels *before; // the file registered before this one
};
namespace {
__global__ void any_kernel() {}
const FileKernels kernels_of_this_file(reinterpret_cast<const void *>(any_kernel));
} // namespace

// Nanoseconds of a clock that all processors of the device share.
__device__ inline uint64_t global_time_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// Host memory as the other side reads and writes it: one access of 16 bytes that the device's own caches do
// not answer. The CUDA C++ Programming Guide (mapped memory) has the host see aligned accesses of up to 16
// bytes in one piece.
__device__ inline uint4 load_whole(const void *at) {
    uint4 x;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(at)
                 : "memory");
    return x;
}
__device__ inline void store_whole(void *at, uint4 x) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

// Between two looks at a flag in host memory, which is an exchange over the bus by itself.
__device__ inline void be_patient() {}

// A kernel that was launched early may begin before the one ahead of it in the stream has ended: what that
// one writes is read, and anything written, after wait_for_previous() only, and past L1 (__ldcg), which may
// have been filled before. let_next_begin() is when all blocks have come to it.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename... Params, typename... Args>
void start_kernel(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                  bool early, Args... args) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...); // launch() asks how it went
}
#endif

} // namespace pi_cuda
#endif
