// elementwise.cu: operations on rows of activations.
#include "operations.h"
#include "rows.cuh"

#include <algorithm>

namespace pi_cuda {
namespace {

constexpr unsigned threads = 256;
constexpr unsigned row_threads = 512; // of a block that reduces a row

__global__ void gather_kernel(const float *x, const uint32_t *rows, uint32_t n, float *out) {
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        out[uint64_t{n} * blockIdx.x + i] = x[uint64_t{n} * rows[blockIdx.x] + i];
}

__global__ void rms_norm_kernel(const float *x, const float *gain, uint32_t n, float eps, float *out) {
    __shared__ float shared[warp_size];
    const float *row = x + uint64_t{n} * blockIdx.x;
    float squares = 0;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        squares += row[i] * row[i];
    squares = block_sum(squares, shared);
    const float scale = 1.0f / sqrtf(squares / static_cast<float>(n) + eps);
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x)
        out[uint64_t{n} * blockIdx.x + i] = row[i] * scale * gain[i];
}

__global__ void gated_silu_kernel(const float *up, uint64_t n, float *gate) {
    for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
         i += uint64_t{gridDim.x} * blockDim.x)
        gate[i] = silu(gate[i]) * up[i];
}

__global__ void gated_relu_kernel(float threshold, const float *up, uint64_t n, float *gate,
                                  unsigned long long *n_active) {
    __shared__ float shared[warp_size];
    float mine = 0; // a float counts far more neurons than a thread meets
    for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
         i += uint64_t{gridDim.x} * blockDim.x) {
        const bool above = gate[i] > threshold;
        mine += above ? 1.0f : 0.0f;
        gate[i] = (above ? gate[i] : 0.0f) * up[i];
    }
    const float all = block_sum(mine, shared);
    if (threadIdx.x == 0 && n_active != nullptr)
        atomicAdd(n_active, static_cast<unsigned long long>(all));
}

__global__ void log_probabilities_kernel(const float *logits, uint32_t n_vocab, const int32_t *targets,
                                         float *out) {
    __shared__ float shared[warp_size];
    const float *row = logits + uint64_t{n_vocab} * blockIdx.x;
    const int32_t target = targets[blockIdx.x];
    float largest = -INFINITY;
    for (uint32_t i = threadIdx.x; i < n_vocab; i += blockDim.x)
        largest = fmaxf(largest, row[i]);
    largest = block_max(largest, shared);
    float sum = 0;
    for (uint32_t i = threadIdx.x; i < n_vocab; i += blockDim.x)
        sum += expf(row[i] - largest);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        out[blockIdx.x] = target < 0 ? NAN : row[target] - largest - logf(sum);
}

unsigned grid_of(uint64_t n) {
    return std::max(1u, std::min(ceil_div(n, threads), 4096u));
}

} // namespace

void normalise(pi_gpu &gpu, const float *x, const float *gain, uint32_t n_rows, uint32_t n, float eps,
               float *out) {
    launch("normalising", gpu, rms_norm_kernel, n_rows, row_threads, 0, x, gain, n, eps, out);
}

int32_t gather(pi_gpu *gpu, const float *x, const uint32_t *rows, uint32_t n_rows, uint32_t n, float *out) {
    return operate(gpu, [&](pi_gpu &device) {
        launch("gathering rows", device, gather_kernel, n_rows, threads, 0, x, rows, n, out);
    });
}

int32_t rms_norm(pi_gpu *gpu, const float *x, const float *gain, uint32_t n_rows, uint32_t n, float eps,
                 float *out) {
    return operate(gpu, [&](pi_gpu &device) { normalise(device, x, gain, n_rows, n, eps, out); });
}

int32_t gated(pi_gpu *gpu, uint32_t activation, float threshold, const float *up, uint64_t n, float *gate,
              uint64_t *n_active) {
    return operate(gpu, [&](pi_gpu &device) {
        if (activation == PI_ACTIVATION_SILU)
            return launch("SiLU", device, gated_silu_kernel, grid_of(n), threads, 0, up, n, gate);
        launch("gated ReLU", device, gated_relu_kernel, grid_of(n), threads, 0, threshold, up, n, gate,
               reinterpret_cast<unsigned long long *>(n_active));
    });
}

int32_t log_probabilities(pi_gpu *gpu, const float *logits, uint32_t n_rows, uint32_t n_vocab,
                          const int32_t *targets, float *out) {
    return operate(gpu, [&](pi_gpu &device) {
        launch("log-probabilities", device, log_probabilities_kernel, n_rows, row_threads, 0, logits, n_vocab,
               targets, out);
    });
}

} // namespace pi_cuda
