// masks.cu: which neurons a predictor names: a bit each. The CPU's are posted to it at once.
#include "device.cuh"
#include "logits.cuh"
#include "operations.h"
#include "rows.cuh"

namespace pi_cuda {
namespace {

constexpr uint32_t word_bits = 32;
constexpr uint32_t block_packets = 4;
constexpr uint32_t block_words = block_packets * PI_GPU_PACKET_WORDS; // a warp each

// Words before the first of block 0 that none has, so that a block begins with the first posted word.
__host__ __device__ uint32_t missing_words(const pi_gpu_mask &work) {
    return (block_words - work.first_word % block_words) % block_words;
}

// Block (words of a token, token).
__global__ void __launch_bounds__(block_words *word_bits)
    mask_kernel(const __grid_constant__ pi_gpu_mask work) {
    __shared__ uint32_t words[block_words];
    const uint32_t n_words = (work.n + word_bits - 1) / word_bits, missing = missing_words(work);
    const uint32_t at = threadIdx.x / word_bits, lane = threadIdx.x % word_bits, token = blockIdx.y;
    const uint32_t word = blockIdx.x * block_words + at - missing; // those that are missing wrap around
    const uint32_t i = word * word_bits + lane;
    const bool exists = blockIdx.x * block_words + at >= missing && word < n_words;
    let_next_begin();
    wait_for_previous();
    const float *logits = work.logits + uint64_t{work.n} * token;
    const uint32_t bits =
        __ballot_sync(0xffffffffu, exists && i < work.n && __ldcg(logits + i) >= work.threshold);
    if (lane == 0) {
        words[at] = bits;
        if (exists)
            work.words[uint64_t{n_words} * token + word] = bits;
    }
    if (work.post.out == nullptr)
        return;
    if (work.post.stamp != nullptr && blockIdx.x == 0 && token == 0 && threadIdx.x == 0)
        *work.post.stamp = global_time_ns();
    __syncthreads();
    const uint32_t first = blockIdx.x * block_words + PI_GPU_PACKET_WORDS * threadIdx.x - missing;
    if (threadIdx.x >= block_packets || blockIdx.x * block_words < missing + work.first_word ||
        first >= n_words)
        return;
    const uint32_t *mine = words + PI_GPU_PACKET_WORDS * threadIdx.x;
    store_whole(work.post.out + uint64_t{token} * work.post.out_stride +
                    (first - work.first_word) / PI_GPU_PACKET_WORDS,
                {mine[0], mine[1], mine[2], (__ldcg(work.post.base) + work.post.order) << 8});
}

constexpr uint32_t packet_neurons = word_bits * PI_GPU_PACKET_WORDS;
constexpr uint32_t predictor_threads = packet_neurons / gemv_rows * logit_lanes; // all of them at once

struct PredictedMask {
    Logits logits;
    uint32_t n; // neurons
    uint32_t *words;
    pi_gpu_post post;
};

// Block b: the neurons of packet b.
template <int type>
__global__ void __launch_bounds__(predictor_threads)
    predicted_mask_kernel(const __grid_constant__ PredictedMask work) {
    PI_SHARED(uint4, shared);
    __shared__ float warp_sums[warp_size];
    __shared__ uint32_t words[PI_GPU_PACKET_WORDS];
    const uint32_t first = packet_neurons * blockIdx.x, n = min(packet_neurons, work.n - first);
    if (threadIdx.x < PI_GPU_PACKET_WORDS)
        words[threadIdx.x] = 0;
    __syncthreads();
    let_next_begin();
    logits_of_rows<type>(
        work.logits, n, [first](uint32_t i) { return first + i; }, shared, warp_sums,
        [&](uint32_t neuron, float logit) {
            if (logit >= work.logits.threshold)
                atomicOr(words + (neuron - first) / word_bits, 1u << neuron % word_bits);
        });
    __syncthreads();
    if (threadIdx.x < (n + word_bits - 1) / word_bits)
        work.words[PI_GPU_PACKET_WORDS * blockIdx.x + threadIdx.x] = words[threadIdx.x];
    if (work.post.out == nullptr || threadIdx.x != 0)
        return;
    if (work.post.stamp != nullptr && blockIdx.x == 0)
        *work.post.stamp = global_time_ns();
    store_whole(work.post.out + blockIdx.x,
                {words[0], words[1], words[2], (__ldcg(work.post.base) + work.post.order) << 8});
}

template <int type>
void start_predicted(pi_gpu &gpu, const PredictedMask &work) {
    launch_early("predicting neurons", gpu, predicted_mask_kernel<type>, ceil_div(work.n, packet_neurons),
                 predictor_threads, hidden_bytes(work.logits), work);
}

void predict_mask(pi_gpu &gpu, const pi_gpu_mask &mask) {
    const pi_gpu_predictor &of = *mask.predictor;
    const pi_gpu_rows &fc2 = of.fc2;
    require_rows(fc2);
    if (!has_logits(fc2.kernel_type, fc2.n_cols)) {
        multiply_logits(gpu, of);
        return mask_rows(gpu, {nullptr, of.logits, 1, fc2.n_rows, of.threshold, 0, mask.words, mask.post});
    }
    const PredictedMask work = {logits_of(of), fc2.n_rows, mask.words, mask.post};
    if (fc2.kernel_type == PI_KT_F16)
        start_predicted<PI_KT_F16>(gpu, work);
    else if (fc2.kernel_type == PI_KT_Q8_0)
        start_predicted<PI_KT_Q8_0>(gpu, work);
    else
        start_predicted<PI_KT_Q5_0>(gpu, work);
}

// Block (neurons, token)
__global__ void hide_kernel(const uint32_t *mask, uint32_t mask_stride, uint32_t n, float *gate,
                            unsigned long long *n_masked) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    const bool inside = i < n;
    const bool open =
        inside && (mask[uint64_t{mask_stride} * token + i / word_bits] >> i % word_bits & 1u) != 0;
    if (inside && !open)
        gate[uint64_t{n} * token + i] = -INFINITY;
    const uint32_t all = __ballot_sync(0xffffffffu, open);
    if (i % word_bits == 0 && all != 0)
        atomicAdd(n_masked, static_cast<unsigned long long>(__popc(all)));
}

} // namespace

int32_t hide(pi_gpu *gpu, const uint32_t *mask, uint32_t mask_stride, uint32_t n_tokens, uint32_t n,
             float *gate, uint64_t *n_masked) {
    return operate(gpu, [&](pi_gpu &device) {
        launch("hiding neurons", device, hide_kernel, dim3(ceil_div(n, 256), n_tokens), 256, 0, mask,
               mask_stride, n, gate, reinterpret_cast<unsigned long long *>(n_masked));
    });
}

void mask_rows(pi_gpu &gpu, const pi_gpu_mask &work) {
    const dim3 grid(ceil_div(ceil_div(work.n, word_bits) + missing_words(work), block_words), work.n_tokens);
    launch_early("masking neurons", gpu, mask_kernel, grid, block_words * word_bits, 0, work);
}

int32_t mask(pi_gpu *gpu, const pi_gpu_mask *work) {
    return operate(gpu, [&](pi_gpu &device) {
        if (work->predictor != nullptr)
            return predict_mask(device, *work);
        mask_rows(device, *work);
    });
}

} // namespace pi_cuda
