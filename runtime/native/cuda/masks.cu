// masks.cu: which neurons a predictor names: a bit each, and ranges of them as lists.
#include "device.cuh"
#include "operations.h"

namespace pi_cuda {
namespace {

constexpr int list_threads = 1024;
constexpr uint32_t word_bits = 32;

// Block (words of a token, token); a warp a word.
__global__ void mask_kernel(const float *logits, uint32_t n, float threshold, uint32_t *words,
                            uint32_t n_words) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    const float *of_token = logits + uint64_t{n} * blockIdx.y;
    const uint32_t word = __ballot_sync(0xffffffffu, i < n && of_token[i] >= threshold);
    if (i % word_bits == 0 && i / word_bits < n_words)
        words[uint64_t{n_words} * blockIdx.y + i / word_bits] = word;
}

// The word that holds bits [32 at, ...) of the range, nothing beyond its n.
__device__ __forceinline__ uint32_t word_of(const uint32_t *words, uint32_t at, uint32_t n) {
    const uint32_t left = n - at * word_bits;
    return left >= word_bits ? words[at] : words[at] & ((1u << left) - 1);
}

// One block; a thread takes a run of words, so that the list ascends.
__global__ void __launch_bounds__(list_threads) list_kernel(const uint32_t *words, uint32_t n, int32_t *index,
                                                            uint32_t *length, unsigned long long *total) {
    __shared__ uint32_t warp_totals[list_threads / warp_size];
    const uint32_t n_words = (n + word_bits - 1) / word_bits;
    const uint32_t each = (n_words + blockDim.x - 1) / blockDim.x;
    const uint32_t begin = min(threadIdx.x * each, n_words), end = min(begin + each, n_words);
    uint32_t mine = 0;
    for (uint32_t w = begin; w < end; ++w)
        mine += static_cast<uint32_t>(__popc(word_of(words, w, n)));
    uint32_t all = 0;
    uint32_t at = exclusive_sum(mine, warp_totals, &all);
    for (uint32_t w = begin; w < end; ++w) {
        for (uint32_t bits = word_of(words, w, n); bits != 0; bits &= bits - 1)
            index[at++] = static_cast<int32_t>(w * word_bits) + __ffs(static_cast<int>(bits)) - 1;
    }
    if (threadIdx.x == 0) {
        *length = all;
        if (total != nullptr)
            *total += all;
    }
}

} // namespace

int32_t mask(pi_gpu *gpu, const float *logits, uint32_t n_tokens, uint32_t n, float threshold,
             uint32_t *words) {
    return operate(gpu, [&](pi_gpu &device) {
        launch("masking neurons", device, mask_kernel, dim3(ceil_div(n, 256), n_tokens), 256, 0, logits, n,
               threshold, words, ceil_div(n, word_bits));
    });
}

int32_t list_mask(pi_gpu *gpu, const uint32_t *words, uint32_t n, const pi_gpu_list *list, uint64_t *total) {
    return operate(gpu, [&](pi_gpu &device) {
        launch("listing neurons", device, list_kernel, 1, list_threads, 0, words, n, list->index,
               list->length, reinterpret_cast<unsigned long long *>(total));
    });
}

} // namespace pi_cuda
