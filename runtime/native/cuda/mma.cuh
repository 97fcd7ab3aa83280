// mma.cuh: the matrix units: m16n8k16 products of float16 with float32 sums, and the loads that feed them.
// Fragments as in the PTX manual; g = lane / 4, t = lane % 4.
#pragma once

#include "device.cuh"

#include <cstring>

namespace pi_cuda {

#if !defined(PI_GPU_EMULATED)
// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8. Thread's part: row g, columns 2
// t and 2 t + 1 of each.
__device__ __forceinline__ void load_matrices(const __half *row, uint32_t (&out)[4]) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// Thread's part: rows 2 t and 2 t + 1, column g of each.
__device__ __forceinline__ void load_transposed(const __half *row, uint32_t (&out)[4]) {
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address)
                 : "memory");
}

// 16 bytes on their way from global into shared memory, aligned to 16; zeros unless `inside`. Copies since
// the last commit_copies() are a group; wait_for_copies<n>() returns when all groups of the thread but the
// last n are there.
__device__ __forceinline__ void copy_async(__half *shared, const __half *global, bool inside) {
#if __CUDA_ARCH__ >= 800
    const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(address), "l"(global), "r"(inside ? 16 : 0)
                 : "memory");
#else
    *reinterpret_cast<uint4 *>(shared) =
        inside ? *reinterpret_cast<const uint4 *>(global) : uint4{0, 0, 0, 0};
#endif
}
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int n>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" : : "n"(n) : "memory");
#endif
}

// c [16, 8] += a [16, 16] . b [16, 8]
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// c [16, 8] += a [16, 32] . b [32, 8], of signed bytes
__device__ __forceinline__ void multiply_add(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int rows = 0; rows < 2; ++rows)
            asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                : "+r"(c[2 * rows]), "+r"(c[2 * rows + 1])
                : "r"(a[2 * half + rows]), "r"(half == 0 ? b0 : b1));
    }
#endif
}
#endif

// Lane's row of a 16 x 16 tile for the four fragments of a: rows 0-7 and 8-15, then the same 8 columns on.
__device__ __forceinline__ const __half *a_tile(const __half *tile, int stride) {
    const int lane = threadIdx.x % warp_size;
    return tile + (lane & 15) * stride + (lane >> 4) * 8;
}

// Of w [n, k], rows are outputs: b0, b1 of outputs 0-7, then of 8-15.
__device__ __forceinline__ const __half *b_tile(const __half *tile, int stride) {
    const int lane = threadIdx.x % warp_size;
    return tile + ((lane & 7) + (lane >> 4) * 8) * stride + (lane >> 3 & 1) * 8;
}

// Of w [k, n], for load_transposed: the same order.
__device__ __forceinline__ const __half *b_tile_transposed(const __half *tile, int stride) {
    const int lane = threadIdx.x % warp_size;
    return tile + (lane & 15) * stride + (lane >> 4) * 8;
}

__device__ __forceinline__ uint32_t pack_halves(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

} // namespace pi_cuda
