// attention.cu: keys and values into their pages, and attention of single tokens: a block the query heads of
// a KV head and a span of pages, a page a warp, so that a page is read once; the last block of a token merges
// the spans by their log-sum-exp in a fixed order.
#include "attention.cuh"

#include "operations.h"

#include <algorithm>

namespace pi_cuda {
namespace {

constexpr int n_warps = 4;
constexpr int max_head_dim = 256;
constexpr uint32_t max_spans = 32;
constexpr uint32_t span_pages = 4; // a shorter span is not worth a block

__device__ __forceinline__ float to_float(float x) {
    return x;
}
__device__ __forceinline__ float to_float(__half x) {
    return __half2float(x);
}
// Elements 2 i and 2 i + 1.
__device__ __forceinline__ float2 pair_at(const float *x, uint32_t i) {
    return reinterpret_cast<const float2 *>(x)[i];
}
__device__ __forceinline__ float2 pair_at(const __half *x, uint32_t i) {
    return two_halves(reinterpret_cast<const uint32_t *>(x)[i]);
}
__device__ __forceinline__ void assign(float x, float *to) {
    *to = x;
}
__device__ __forceinline__ void assign(float x, __half *to) {
    *to = __float2half_rn(x);
}

// Heads of a step before they are attended to: angles of the tokens, [n_tokens, n_rot / 2].
struct Placing {
    pi_gpu_kv kv;
    pi_gpu_step step;
    uint32_t n_heads;
    uint32_t n_rot;
    const float *cosine, *sine;
    float *q;
    const float *k, *v;
};

// Dimensions 2 i and 2 i + 1 of a head, turned.
__device__ __forceinline__ float2 turned(const Placing &work, const float *head, uint32_t token, uint32_t i) {
    const float2 pair = {head[2 * i], head[2 * i + 1]};
    const uint32_t pairs = work.n_rot / 2;
    if (i >= pairs)
        return pair;
    const float c = work.cosine[uint64_t{token} * pairs + i], s = work.sine[uint64_t{token} * pairs + i];
    return {pair.x * c - pair.y * s, pair.x * s + pair.y * c};
}

// Block (head, token): a query head is turned where it is. Of a KV head K, turned, becomes column slot % 32
// of [head_dim, 32], V row slot % 32 of [32, head_dim].
template <typename T>
__global__ void place_kernel(const __grid_constant__ Placing work) {
    const uint32_t token = blockIdx.y, head_dim = work.kv.head_dim;
    let_next_begin();
    wait_for_previous();
    if (blockIdx.x < work.n_heads) {
        float *q = work.q + (uint64_t{token} * work.n_heads + blockIdx.x) * head_dim;
        for (uint32_t i = threadIdx.x; i < work.n_rot / 2; i += blockDim.x) {
            const float2 pair = turned(work, q, token, i);
            q[2 * i] = pair.x;
            q[2 * i + 1] = pair.y;
        }
        return;
    }
    const uint32_t head = blockIdx.x - work.n_heads, slot = work.step.slot[token];
    const uint32_t page_id =
        work.step.table[uint64_t{work.step.table_stride} * work.step.sequence[token] + slot / page];
    auto *to_k = reinterpret_cast<T *>(const_cast<uint8_t *>(kv_head(work.kv, page_id, head)));
    T *to_v = to_k + head_dim * page + slot % page * head_dim;
    const uint64_t from = (uint64_t{token} * work.kv.n_kv_heads + head) * head_dim;
    for (uint32_t i = threadIdx.x; i < head_dim / 2; i += blockDim.x) {
        const float2 pair = turned(work, work.k + from, token, i);
        assign(pair.x, to_k + 2 * i * page + slot % page);
        assign(pair.y, to_k + (2 * i + 1) * page + slot % page);
        assign(work.v[from + 2 * i], to_v + 2 * i);
        assign(work.v[from + 2 * i + 1], to_v + 2 * i + 1);
    }
}

struct Spans {
    uint32_t n;
    uint32_t blocks_of_kv; // of a KV head: its query heads, a few each
    float *out;            // [n_tokens, n_heads, n, head_dim] not normalised
    float2 *totals;        // [n_tokens, n_heads, n] peak and sum
    uint32_t *n_done;      // [n_tokens, blocks of all KV heads] spans that are there; 0 before and after
};

// The query heads that a block computes: [first, first + n).
struct Heads {
    uint32_t first;
    uint32_t n;
};

template <int group>
__device__ __forceinline__ Heads heads_of_block(const pi_gpu_attention &work, const Spans &spans) {
    const uint32_t of_kv = work.n_heads / work.kv.n_kv_heads;
    const uint32_t kv = blockIdx.x / spans.blocks_of_kv, part = blockIdx.x % spans.blocks_of_kv;
    return {kv * of_kv + part * group, min(of_kv - part * group, static_cast<uint32_t>(group))};
}

// A warp's running softmax of each head; pair i of a lane is dimensions 64 i + 2 lane and the one after.
template <int group, int pairs>
struct Running {
    float peak[group];
    float sum[group];
    float2 out[group][pairs];
};

// q [group, max_head_dim]
template <typename T, int group, int pairs>
__device__ __forceinline__ void attend_page(const pi_gpu_attention &work, const float (*q)[max_head_dim],
                                            uint32_t token, uint32_t page_index, const T *k,
                                            Running<group, pairs> &run) {
    const uint32_t lane = threadIdx.x % warp_size, head_dim = work.kv.head_dim;
    const bool visible = sees(work.step, token, page_index * page + lane);
    if (__ballot_sync(0xffffffffu, visible) == 0)
        return;
    float weight[group] = {};
#pragma unroll 8
    for (uint32_t d = 0; d < head_dim; ++d) {
        const float key = to_float(k[d * page + lane]);
#pragma unroll
        for (int g = 0; g < group; ++g)
            weight[g] += q[g][d] * key;
    }
#pragma unroll
    for (int g = 0; g < group; ++g) {
        const float peak = fmaxf(run.peak[g], warp_max(visible ? weight[g] : -INFINITY));
        weight[g] = visible ? expf(weight[g] - peak) : 0.0f;
        const float rescale = expf(run.peak[g] - peak);
        run.peak[g] = peak;
        run.sum[g] = run.sum[g] * rescale + warp_sum(weight[g]);
#pragma unroll
        for (int i = 0; i < pairs; ++i)
            run.out[g][i] = {run.out[g][i].x * rescale, run.out[g][i].y * rescale};
    }
    const T *v = k + head_dim * page;
#pragma unroll 4
    for (int p = 0; p < page; ++p) {
        float w[group];
#pragma unroll
        for (int g = 0; g < group; ++g)
            w[g] = __shfl_sync(0xffffffffu, weight[g], p);
#pragma unroll
        for (int i = 0; i < pairs; ++i) {
            const uint32_t pair = i * warp_size + lane;
            if (2 * pair >= head_dim)
                continue;
            const float2 value = pair_at(v + p * head_dim, pair);
#pragma unroll
            for (int g = 0; g < group; ++g) {
                run.out[g][i].x += w[g] * value.x;
                run.out[g][i].y += w[g] * value.y;
            }
        }
    }
}

__device__ __forceinline__ void finish_row(const pi_gpu_attention &work, uint32_t row, float peak,
                                           float sum) {
    if (threadIdx.x == 0 && work.lse != nullptr)
        work.lse[row] = peak + logf(sum);
}

// The warps' results of head g become the block's: a span's, or the row of the output where there is one
// span.
template <int group, int pairs>
__device__ __forceinline__ void merge_warps(const pi_gpu_attention &work, const Spans &spans,
                                            const float2 (*shared_out)[group][pairs * warp_size],
                                            const float2 (*totals)[group], uint32_t g, uint32_t row) {
    const uint32_t head_dim = work.kv.head_dim;
    float peak = -INFINITY, sum = 0;
    for (int w = 0; w < n_warps; ++w)
        peak = fmaxf(peak, totals[w][g].x);
    for (int w = 0; w < n_warps; ++w)
        sum += totals[w][g].y == 0 ? 0 : totals[w][g].y * expf(totals[w][g].x - peak);
    const uint64_t at = spans.n == 1 ? uint64_t{row} : uint64_t{row} * spans.n + blockIdx.z;
    float *out = (spans.n == 1 ? work.out : spans.out) + at * head_dim;
    const float scale = spans.n == 1 ? 1.0f / sum : 1.0f;
    for (uint32_t d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float value = 0;
        for (int w = 0; w < n_warps; ++w)
            value += totals[w][g].y == 0
                         ? 0
                         : reinterpret_cast<const float *>(shared_out[w][g])[d] * expf(totals[w][g].x - peak);
        out[d] = value * scale;
    }
    if (spans.n == 1)
        finish_row(work, row, peak, sum);
    else if (threadIdx.x == 0)
        spans.totals[at] = {peak, sum};
}

// The spans of a row.
__device__ __forceinline__ void merge_spans(const pi_gpu_attention &work, const Spans &spans, uint32_t row) {
    const uint32_t head_dim = work.kv.head_dim;
    const float2 *totals = spans.totals + uint64_t{row} * spans.n;
    float peak = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < spans.n; ++i)
        peak = fmaxf(peak, totals[i].x);
    for (uint32_t i = 0; i < spans.n; ++i)
        sum += totals[i].y == 0 ? 0 : totals[i].y * expf(totals[i].x - peak);
    for (uint32_t d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float value = 0;
        for (uint32_t i = 0; i < spans.n; ++i) {
            if (totals[i].y != 0)
                value += spans.out[(uint64_t{row} * spans.n + i) * head_dim + d] * expf(totals[i].x - peak);
        }
        work.out[uint64_t{row} * head_dim + d] = value / sum;
    }
    finish_row(work, row, peak, sum);
}

// Block (a few query heads of a KV head, token, span).
template <typename T, int group, int pairs>
__global__ void __launch_bounds__(n_warps *warp_size)
    attend_kernel(const __grid_constant__ pi_gpu_attention work, const __grid_constant__ Spans spans) {
    __shared__ float q[group][max_head_dim];
    __shared__ float2 shared_out[n_warps][group][pairs * warp_size]; // floats would be aligned as floats are
    __shared__ float2 totals[n_warps][group];
    const uint32_t token = blockIdx.y, head_dim = work.kv.head_dim;
    const uint32_t lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    const pi_gpu_step &step = work.step;
    const Heads heads = heads_of_block<group>(work, spans);
    const uint32_t first_row = token * work.n_heads + heads.first;
    const float scale = 1.0f / sqrtf(static_cast<float>(head_dim));
    let_next_begin();
    wait_for_previous();
#pragma unroll
    for (int g = 0; g < group; ++g) {
        const uint32_t row = first_row + min(static_cast<uint32_t>(g), heads.n - 1);
        for (uint32_t d = threadIdx.x; d < head_dim; d += blockDim.x)
            q[g][d] = work.q[uint64_t{row} * head_dim + d] * scale;
    }
    __syncthreads();
    const uint32_t first = step.oldest[token] / page, end = step.slot[token] / page + 1;
    const uint32_t each = (end - first + spans.n - 1) / spans.n;
    const uint32_t span_begin = first + blockIdx.z * each, span_end = min(span_begin + each, end);
    const uint32_t *table = step.table + uint64_t{step.table_stride} * step.sequence[token];
    const uint32_t of_kv = blockIdx.x / spans.blocks_of_kv;
    Running<group, pairs> run = {};
#pragma unroll
    for (int g = 0; g < group; ++g)
        run.peak[g] = -INFINITY;
    for (uint32_t i = span_begin + warp; i < span_end; i += n_warps)
        attend_page<T, group, pairs>(work, q, token, i,
                                     reinterpret_cast<const T *>(kv_head(work.kv, table[i], of_kv)), run);
#pragma unroll
    for (int g = 0; g < group; ++g) {
        if (lane == 0)
            totals[warp][g] = {run.peak[g], run.sum[g]};
#pragma unroll
        for (int i = 0; i < pairs; ++i)
            shared_out[warp][g][i * warp_size + lane] = run.out[g][i];
    }
    __syncthreads();
    for (uint32_t g = 0; g < heads.n; ++g)
        merge_warps<group, pairs>(work, spans, shared_out, totals, g, first_row + g);
    if (spans.n == 1 || !is_last_block(spans.n_done + token * gridDim.x + blockIdx.x, spans.n))
        return;
    for (uint32_t g = 0; g < heads.n; ++g)
        merge_spans(work, spans, first_row + g);
}

template <typename T, int group, int pairs>
void start_attention(pi_gpu &gpu, const pi_gpu_attention &work, Spans spans) {
    const uint32_t of_kv = work.n_heads / work.kv.n_kv_heads;
    spans.blocks_of_kv = ceil_div(of_kv, group);
    const dim3 grid(work.kv.n_kv_heads * spans.blocks_of_kv, work.step.n_tokens, spans.n);
    launch_early("attention", gpu, attend_kernel<T, group, pairs>, grid, n_warps * warp_size, 0, work, spans);
}

template <typename T, int pairs>
void for_group(pi_gpu &gpu, const pi_gpu_attention &work, const Spans &spans) {
    const uint32_t of_kv = work.n_heads / work.kv.n_kv_heads;
    if (of_kv == 1)
        return start_attention<T, 1, pairs>(gpu, work, spans);
    if (of_kv == 2)
        return start_attention<T, 2, pairs>(gpu, work, spans);
    if (of_kv <= 4)
        return start_attention<T, 4, pairs>(gpu, work, spans);
    start_attention<T, 8, pairs>(gpu, work, spans);
}

template <typename T>
void for_head_dim(pi_gpu &gpu, const pi_gpu_attention &work, const Spans &spans) {
    if (work.kv.head_dim <= 64)
        return for_group<T, 1>(gpu, work, spans);
    if (work.kv.head_dim <= 128)
        return for_group<T, 2>(gpu, work, spans);
    for_group<T, 4>(gpu, work, spans);
}

// About four blocks a processor; one span where there are as many without.
void attend_tokens(pi_gpu &gpu, const pi_gpu_attention &work) {
    const uint32_t of_all_spans = work.step.n_tokens * work.kv.n_kv_heads;
    const uint32_t wanted = ceil_div(4u * static_cast<uint32_t>(gpu.n_processors), of_all_spans);
    Spans spans{};
    spans.n = std::max(1u, std::min({wanted, ceil_div(work.step.most_pages, span_pages), max_spans}));
    if (spans.n > 1) {
        const uint64_t n = uint64_t{work.step.n_tokens} * work.n_heads * spans.n;
        spans.out = scratch_of<float>(gpu, gpu.partials, n * (work.kv.head_dim + 2));
        spans.totals = reinterpret_cast<float2 *>(spans.out + n * work.kv.head_dim);
        spans.n_done = counters(gpu, work.step.n_tokens * work.n_heads);
    }
    if (work.kv.half_precision != 0)
        for_head_dim<__half>(gpu, work, spans);
    else
        for_head_dim<float>(gpu, work, spans);
}

} // namespace

int32_t place_heads(pi_gpu *gpu, const pi_gpu_kv *kv, const pi_gpu_step *step, const pi_gpu_rope *rope,
                    float *q, const float *k, const float *v) {
    return operate(gpu, [&](pi_gpu &device) {
        if (kv->head_dim % 2 != 0)
            throw Failure{PI_FAILURE, "heads of an odd number of dimensions"};
        const Placing work = {*kv, *step, rope->n_heads, rope->n_rot, rope->cosine, rope->sine, q, k, v};
        launch_early("placing heads", device,
                     kv->half_precision != 0 ? place_kernel<__half> : place_kernel<float>,
                     dim3(rope->n_heads + kv->n_kv_heads, step->n_tokens), 64, 0, work);
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
