// attention.cuh: what the attention kernels share.
#pragma once

#include "types.cuh"

namespace pi_cuda {

constexpr int page = PI_PAGE;
static_assert(page == warp_size, "a lane is a position of a page");
constexpr uint32_t max_head_dim = 256;

__device__ __forceinline__ const uint8_t *kv_head(const pi_gpu_kv &kv, uint32_t page_id, uint32_t head) {
    const uint64_t half_bytes = uint64_t{kv.head_dim} * page * (kv.half_precision != 0 ? 2 : 4);
    return kv.base + page_id * kv.page_bytes + head * 2 * half_bytes;
}

// Whether the token sees a position of its sequence.
__device__ __forceinline__ bool sees(const pi_gpu_step &step, uint32_t token, uint32_t position) {
    if (step.tree == nullptr)
        return position >= step.oldest[token] && position <= step.slot[token];
    const uint32_t old_length = step.old_length[token];
    if (position < old_length)
        return position >= step.oldest[token];
    const uint32_t j = position - old_length;
    return j < step.tree_words * 64 &&
           (step.tree[uint64_t{step.tree_words} * token + j / 64] >> (j % 64) & 1) != 0;
}

// Tiles of tokens on the matrix units; false where the shape has no such kernel.
bool attend_tiles(pi_gpu &gpu, const pi_gpu_attention &work);

// Token by token.
void attend_tokens(pi_gpu &gpu, const pi_gpu_attention &work);

} // namespace pi_cuda
