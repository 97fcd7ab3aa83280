// masks.cu: which neurons a predictor names: a bit each.
#include "device.cuh"
#include "operations.h"
#include "rows.cuh"

namespace pi_cuda {
namespace {

constexpr uint32_t word_bits = 32;

// Block (words of a token, token); a warp a word.
__global__ void mask_kernel(const float *logits, uint32_t n, float threshold, uint32_t *words,
                            uint32_t n_words) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    const float *of_token = logits + uint64_t{n} * blockIdx.y;
    let_next_begin();
    wait_for_previous();
    const uint32_t word = __ballot_sync(0xffffffffu, i < n && of_token[i] >= threshold);
    if (i % word_bits == 0 && i / word_bits < n_words)
        words[uint64_t{n_words} * blockIdx.y + i / word_bits] = word;
}

} // namespace

void mask_rows(pi_gpu &gpu, const float *logits, uint32_t n_tokens, uint32_t n, float threshold,
               uint32_t *words) {
    launch_early("masking neurons", gpu, mask_kernel, dim3(ceil_div(n, 256), n_tokens), 256, 0, logits, n,
                 threshold, words, ceil_div(n, word_bits));
}

int32_t mask(pi_gpu *gpu, const float *logits, uint32_t n_tokens, uint32_t n, float threshold,
             uint32_t *words) {
    return operate(gpu, [&](pi_gpu &device) { mask_rows(device, logits, n_tokens, n, threshold, words); });
}

} // namespace pi_cuda
