// attention.cu: keys and values into their pages, and attention of single tokens: a block a query head and a
// span of pages, a page a warp, spans merged by their log-sum-exp in a fixed order.
#include "attention.cuh"

#include "operations.h"

#include <algorithm>

namespace pi_cuda {
namespace {

constexpr int n_warps = 4;
constexpr int max_head_dim = 256;
constexpr int lane_dims = max_head_dim / warp_size;
constexpr uint32_t max_spans = 32;
constexpr uint32_t span_pages = 4; // a shorter span is not worth a block

template <typename T>
__device__ __forceinline__ float to_float(T x);
template <>
__device__ __forceinline__ float to_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ float to_float<__half>(__half x) {
    return __half2float(x);
}
__device__ __forceinline__ void assign(float x, float *to) {
    *to = x;
}
__device__ __forceinline__ void assign(float x, __half *to) {
    *to = __float2half_rn(x);
}

// Block (kv head, token): K becomes column slot % 32 of [head_dim, 32], V row slot % 32 of [32, head_dim].
template <typename T>
__global__ void store_kv_kernel(const __grid_constant__ pi_gpu_kv kv,
                                const __grid_constant__ pi_gpu_step step, const float *k, const float *v) {
    const uint32_t head = blockIdx.x, token = blockIdx.y, slot = step.slot[token];
    const uint32_t page_id = step.table[uint64_t{step.table_stride} * step.sequence[token] + slot / page];
    auto *to_k = reinterpret_cast<T *>(const_cast<uint8_t *>(kv_head(kv, page_id, head)));
    T *to_v = to_k + kv.head_dim * page;
    const uint64_t from = (uint64_t{token} * kv.n_kv_heads + head) * kv.head_dim;
    for (uint32_t d = threadIdx.x; d < kv.head_dim; d += blockDim.x) {
        assign(k[from + d], to_k + d * page + slot % page);
        assign(v[from + d], to_v + slot % page * kv.head_dim + d);
    }
}

struct Spans {
    uint32_t n;
    float *out;     // [n_tokens, n_heads, n, head_dim] not normalised
    float2 *totals; // [n_tokens, n_heads, n] peak and sum
};

// A warp's running softmax; dimension i * 32 + lane is out[i].
struct Running {
    float peak;
    float sum;
    float out[lane_dims];
};

template <typename T>
__device__ __forceinline__ void attend_page(const pi_gpu_attention &work, const float *q, uint32_t token,
                                            uint32_t page_index, const T *k, Running &run) {
    const uint32_t lane = threadIdx.x % warp_size, head_dim = work.kv.head_dim;
    const bool visible = sees(work.step, token, page_index * page + lane);
    if (__ballot_sync(0xffffffffu, visible) == 0)
        return;
    float score = 0;
#pragma unroll 8
    for (uint32_t d = 0; d < head_dim; ++d)
        score += q[d] * to_float(k[d * page + lane]);
    const float peak = fmaxf(run.peak, warp_max(visible ? score : -INFINITY));
    const float weight = visible ? expf(score - peak) : 0.0f;
    const float rescale = expf(run.peak - peak);
    run.peak = peak;
    run.sum = run.sum * rescale + warp_sum(weight);
    const T *v = k + head_dim * page;
#pragma unroll
    for (int i = 0; i < lane_dims; ++i)
        run.out[i] *= rescale;
    for (int p = 0; p < page; ++p) {
        const float w = __shfl_sync(0xffffffffu, weight, p);
#pragma unroll
        for (int i = 0; i < lane_dims; ++i) {
            const uint32_t d = i * warp_size + lane;
            if (d < head_dim && w != 0)
                run.out[i] += w * to_float(v[p * head_dim + d]);
        }
    }
}

// The warps' results become the block's.
__device__ __forceinline__ void merge_warps(const pi_gpu_attention &work, const Spans &spans,
                                            const Running &run, float (*shared_out)[max_head_dim],
                                            float2 *shared_totals) {
    const uint32_t lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size,
                   head_dim = work.kv.head_dim;
    if (lane == 0)
        shared_totals[warp] = {run.peak, run.sum};
#pragma unroll
    for (int i = 0; i < lane_dims; ++i)
        shared_out[warp][i * warp_size + lane] = run.out[i];
    __syncthreads();
    float peak = -INFINITY, sum = 0;
    for (int w = 0; w < n_warps; ++w)
        peak = fmaxf(peak, shared_totals[w].x);
    for (int w = 0; w < n_warps; ++w)
        sum += shared_totals[w].y == 0 ? 0 : shared_totals[w].y * expf(shared_totals[w].x - peak);
    const uint64_t row = (uint64_t{blockIdx.y} * work.n_heads + blockIdx.x) * spans.n + blockIdx.z;
    for (uint32_t d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float value = 0;
        for (int w = 0; w < n_warps; ++w)
            value += shared_totals[w].y == 0 ? 0 : shared_out[w][d] * expf(shared_totals[w].x - peak);
        spans.out[row * head_dim + d] = value;
    }
    if (threadIdx.x == 0)
        spans.totals[row] = {peak, sum};
}

// Block (query head, token, span).
template <typename T>
__global__ void __launch_bounds__(n_warps *warp_size)
    attend_kernel(const __grid_constant__ pi_gpu_attention work, const __grid_constant__ Spans spans) {
    __shared__ float q[max_head_dim];
    __shared__ float shared_out[n_warps][max_head_dim];
    __shared__ float2 shared_totals[n_warps];
    const uint32_t head = blockIdx.x, token = blockIdx.y, head_dim = work.kv.head_dim;
    const pi_gpu_step &step = work.step;
    const float scale = 1.0f / sqrtf(static_cast<float>(head_dim));
    for (uint32_t d = threadIdx.x; d < head_dim; d += blockDim.x)
        q[d] = work.q[(uint64_t{token} * work.n_heads + head) * head_dim + d] * scale;
    __syncthreads();
    const uint32_t first = step.oldest[token] / page, end = step.slot[token] / page + 1;
    const uint32_t each = (end - first + spans.n - 1) / spans.n;
    const uint32_t span_begin = first + blockIdx.z * each, span_end = min(span_begin + each, end);
    const uint32_t *table = step.table + uint64_t{step.table_stride} * step.sequence[token];
    const uint32_t of_kv = head / (work.n_heads / work.kv.n_kv_heads);
    Running run = {-INFINITY, 0, {}};
    for (uint32_t i = span_begin + threadIdx.x / warp_size; i < span_end; i += n_warps)
        attend_page(work, q, token, i, reinterpret_cast<const T *>(kv_head(work.kv, table[i], of_kv)), run);
    merge_warps(work, spans, run, shared_out, shared_totals);
}

// Block (query head, token).
__global__ void merge_kernel(const __grid_constant__ pi_gpu_attention work,
                             const __grid_constant__ Spans spans) {
    const uint32_t head_dim = work.kv.head_dim;
    const uint64_t row = uint64_t{blockIdx.y} * work.n_heads + blockIdx.x;
    const float2 *totals = spans.totals + row * spans.n;
    float peak = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < spans.n; ++i)
        peak = fmaxf(peak, totals[i].x);
    for (uint32_t i = 0; i < spans.n; ++i)
        sum += totals[i].y == 0 ? 0 : totals[i].y * expf(totals[i].x - peak);
    for (uint32_t d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float value = 0;
        for (uint32_t i = 0; i < spans.n; ++i) {
            if (totals[i].y != 0)
                value += spans.out[(row * spans.n + i) * head_dim + d] * expf(totals[i].x - peak);
        }
        work.out[row * head_dim + d] = value / sum;
    }
    if (threadIdx.x == 0 && work.lse != nullptr)
        work.lse[row] = peak + logf(sum);
}

void attend_tokens(pi_gpu &gpu, const pi_gpu_attention &work) {
    const uint32_t n_rows = work.step.n_tokens * work.n_heads;
    const uint32_t wanted = ceil_div(4u * static_cast<uint32_t>(gpu.n_processors), n_rows);
    Spans spans{};
    spans.n = std::max(1u, std::min({wanted, ceil_div(work.step.most_pages, span_pages), max_spans}));
    const uint64_t n = uint64_t{n_rows} * spans.n;
    spans.out = scratch_of<float>(gpu, gpu.partials, n * (work.kv.head_dim + 2));
    spans.totals = reinterpret_cast<float2 *>(spans.out + n * work.kv.head_dim);
    const dim3 grid(work.n_heads, work.step.n_tokens, spans.n);
    launch("attention", gpu, work.kv.half_precision != 0 ? attend_kernel<__half> : attend_kernel<float>, grid,
           n_warps * warp_size, 0, work, spans);
    launch("merging attention", gpu, merge_kernel, dim3(work.n_heads, work.step.n_tokens), 128, 0, work,
           spans);
}

} // namespace

int32_t store_kv(pi_gpu *gpu, const pi_gpu_kv *kv, const pi_gpu_step *step, const float *k, const float *v) {
    return operate(gpu, [&](pi_gpu &device) {
        launch("storing keys and values", device,
               kv->half_precision != 0 ? store_kv_kernel<__half> : store_kv_kernel<float>,
               dim3(kv->n_kv_heads, step->n_tokens), 64, 0, *kv, *step, k, v);
    });
}

int32_t attend(pi_gpu *gpu, const pi_gpu_attention *work) {
    return operate(gpu, [&](pi_gpu &device) {
        if (work->kv.head_dim > max_head_dim || work->kv.head_dim % 2 != 0)
            throw Failure{PI_FAILURE, "heads of " + std::to_string(work->kv.head_dim) +
                                          " dimensions: the device's kernels take even numbers up to 256"};
        if (!attend_tiles(device, *work))
            attend_tokens(device, *work);
    });
}

} // namespace pi_cuda
