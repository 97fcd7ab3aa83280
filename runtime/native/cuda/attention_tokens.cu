// attention_tokens.cu: attention of single tokens: a block has query heads of a KV head and a span of pages,
// which its warps take in turns, so that a page is read once. Pages are copied into shared memory, the next
// one's keys while the values of the one before are added. The last block of a token merges the spans by
// their log-sum-exp in a fixed order.
#include "attention.cuh"
#include "mma.cuh"

#include <algorithm>

namespace pi_cuda {
namespace {

constexpr uint32_t most_warps = 4;
constexpr uint32_t max_spans = 32; // a lane each where they are merged
constexpr uint32_t span_pages = 4; // a shorter span is not worth a block

// Positions in 16 bytes of a dimension's keys, and the lanes that hold them all.
template <typename T>
constexpr int key_run = 16 / sizeof(T);
template <typename T>
constexpr int key_lanes = page / key_run<T>;

__device__ __forceinline__ void unpack_keys(const __half *from, float (&key)[8]) {
    const uint4 bits = *reinterpret_cast<const uint4 *>(from);
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const float2 pair = two_halves(words[w]);
        key[2 * w] = pair.x, key[2 * w + 1] = pair.y;
    }
}
__device__ __forceinline__ void unpack_keys(const float *from, float (&key)[4]) {
    const float4 values = *reinterpret_cast<const float4 *>(from);
    key[0] = values.x, key[1] = values.y, key[2] = values.z, key[3] = values.w;
}

// Elements 2 i and 2 i + 1.
__device__ __forceinline__ float2 pair_at(const float *x, uint32_t i) {
    return reinterpret_cast<const float2 *>(x)[i];
}
__device__ __forceinline__ float2 pair_at(const __half *x, uint32_t i) {
    return two_halves(reinterpret_cast<const uint32_t *>(x)[i]);
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

// Queues a page's keys or values of a head for shared memory, as a group of copies that is empty unless
// `wanted`.
template <typename T>
__device__ __forceinline__ void copy_page(T *to, const T *from, uint32_t head_dim, bool wanted) {
    constexpr uint32_t halves = 8; // of 16 bytes
    auto *out = reinterpret_cast<__half *>(to);
    const auto *in = reinterpret_cast<const __half *>(from);
    const uint32_t n = wanted ? head_dim * page * static_cast<uint32_t>(sizeof(T) / sizeof(__half)) : 0;
    for (uint32_t i = threadIdx.x % warp_size * halves; i < n; i += warp_size * halves)
        copy_async(out + i, in + i, true);
    commit_copies();
}

// Scores of the position that is returned, of the page's 32.
template <typename T, int group>
__device__ __forceinline__ uint32_t multiply_keys(const float (*q)[max_head_dim], const T *k,
                                                  uint32_t head_dim, float (&score)[group]) {
    constexpr int n = key_run<T>;
    constexpr uint32_t lanes = key_lanes<T>;
    const uint32_t lane = threadIdx.x % warp_size;
    float sum[group][n] = {};
#pragma unroll 4
    for (uint32_t d = lane / lanes; d < head_dim; d += warp_size / lanes) {
        float key[n];
        unpack_keys(k + d * page + lane % lanes * n, key);
#pragma unroll
        for (int g = 0; g < group; ++g) {
            const float of_q = q[g][d];
#pragma unroll
            for (int j = 0; j < n; ++j)
                sum[g][j] += of_q * key[j];
        }
    }
    uint32_t position = 0;
#pragma unroll
    for (int g = 0; g < group; ++g) {
        position = lane % lanes * n;
        merge_lanes<n / 2, warp_size / 2, lanes>(sum[g], position);
        score[g] = sum[g][0];
    }
    return position;
}

// Scores become weights, weights [group, 32] of the positions; the running sums follow the new peaks.
template <int group, int pairs>
__device__ __forceinline__ void soften(const float (&score)[group], bool visible, uint32_t position,
                                       float (*weights)[page], Running<group, pairs> &run) {
#pragma unroll
    for (int g = 0; g < group; ++g) {
        const float peak = fmaxf(run.peak[g], warp_max(visible ? score[g] : -INFINITY));
        const float base = peak == -INFINITY ? 0.0f : peak; // nothing visible yet
        const float weight = visible ? expf(score[g] - base) : 0.0f;
        const float rescale = expf(run.peak[g] - base);
        weights[g][position] = weight;
        run.peak[g] = peak;
        run.sum[g] = run.sum[g] * rescale + warp_sum(weight);
#pragma unroll
        for (int i = 0; i < pairs; ++i)
            run.out[g][i] = {run.out[g][i].x * rescale, run.out[g][i].y * rescale};
    }
}

template <typename T, int group, int pairs>
__device__ __forceinline__ void add_values(const float (*weights)[page], const T *v, uint32_t head_dim,
                                           Running<group, pairs> &run) {
    constexpr int n = 4;
#pragma unroll 2
    for (int p = 0; p < page; p += n) {
        float w[group][n];
#pragma unroll
        for (int g = 0; g < group; ++g) {
            const float4 four = *reinterpret_cast<const float4 *>(weights[g] + p);
            w[g][0] = four.x, w[g][1] = four.y, w[g][2] = four.z, w[g][3] = four.w;
        }
#pragma unroll
        for (int j = 0; j < n; ++j) {
#pragma unroll
            for (int i = 0; i < pairs; ++i) {
                const uint32_t pair = i * warp_size + threadIdx.x % warp_size;
                if (2 * pair >= head_dim)
                    continue;
                const float2 value = pair_at(v + (p + j) * head_dim, pair);
#pragma unroll
                for (int g = 0; g < group; ++g) {
                    run.out[g][i].x += w[g][j] * value.x;
                    run.out[g][i].y += w[g][j] * value.y;
                }
            }
        }
    }
}

// A warp's pages: `first`, and every n_warps-th after it before `end`.
struct WarpPages {
    uint32_t first, end;
    const uint32_t *table;
    uint32_t kv_head;
};

template <typename T>
__device__ __forceinline__ const T *keys_of(const pi_gpu_kv &kv, const WarpPages &pages, uint32_t i) {
    return reinterpret_cast<const T *>(kv_head(kv, pages.table[i], pages.kv_head));
}

// k: shared memory for a page, whose copy is on its way; values come after the keys.
template <typename T, int group, int pairs>
__device__ __forceinline__ void attend_pages(const pi_gpu_attention &work, const WarpPages &pages,
                                             const float (*q)[max_head_dim], float (*weights)[page], T *k,
                                             Running<group, pairs> &run) {
    const uint32_t token = blockIdx.y, head_dim = work.kv.head_dim, stride = blockDim.x / warp_size;
    T *v = k + head_dim * page;
    for (uint32_t i = pages.first; i < pages.end; i += stride) {
        const bool more = i + stride < pages.end;
        const T *next = keys_of<T>(work.kv, pages, more ? i + stride : i);
        float score[group];
        wait_for_copies<1>(); // values may come later
        __syncwarp();
        const uint32_t position = multiply_keys<T, group>(q, k, head_dim, score);
        __syncwarp();
        copy_page(k, next, head_dim, more);
        soften<group, pairs>(score, sees(work.step, token, i * page + position), position, weights, run);
        wait_for_copies<1>();
        __syncwarp();
        add_values<T, group, pairs>(weights, v, head_dim, run);
        __syncwarp();
        copy_page(v, next + head_dim * page, head_dim, more);
    }
    wait_for_copies<0>();
    __syncwarp();
}

__device__ __forceinline__ void write_lse(const pi_gpu_attention &work, uint32_t row, float peak, float sum) {
    if (work.lse != nullptr)
        work.lse[row] = peak + logf(sum);
}

// The warps' results of some heads become the block's: a span's, or rows of the output where there is one
// span. shared_out: a warp's [group, head_dim], `stride` floats apart.
template <int group>
__device__ __forceinline__ void merge_warps(const pi_gpu_attention &work, const Spans &spans,
                                            const Heads &heads, const float *shared_out, uint32_t stride,
                                            const float2 (*totals)[group]) {
    const uint32_t head_dim = work.kv.head_dim, n_warps = blockDim.x / warp_size;
    for (uint32_t i = threadIdx.x; i < heads.n * head_dim; i += blockDim.x) {
        const uint32_t g = i / head_dim, d = i % head_dim;
        const uint32_t row = blockIdx.y * work.n_heads + heads.first + g;
        float peak = -INFINITY, sum = 0, value = 0;
        for (uint32_t w = 0; w < n_warps; ++w)
            peak = fmaxf(peak, totals[w][g].x);
        for (uint32_t w = 0; w < n_warps; ++w) {
            const float factor = totals[w][g].y == 0 ? 0 : expf(totals[w][g].x - peak);
            sum += totals[w][g].y * factor;
            value += shared_out[w * stride + i] * factor;
        }
        if (spans.n == 1) {
            work.out[uint64_t{row} * head_dim + d] = value / sum;
            if (d == 0)
                write_lse(work, row, peak, sum);
            continue;
        }
        const uint64_t at = uint64_t{row} * spans.n + blockIdx.z;
        spans.out[at * head_dim + d] = value;
        if (d == 0)
            spans.totals[at] = {peak, sum};
    }
}

// factors [group, 32] shared: of the spans.
template <int group>
__device__ __forceinline__ void merge_spans(const pi_gpu_attention &work, const Spans &spans,
                                            const Heads &heads, float (*factors)[page]) {
    static_assert(max_spans == page, "factors of a page's weights");
    const uint32_t head_dim = work.kv.head_dim, lane = threadIdx.x % warp_size;
    const uint32_t first_row = blockIdx.y * work.n_heads + heads.first;
    for (uint32_t g = threadIdx.x / warp_size; g < heads.n; g += blockDim.x / warp_size) {
        float2 total = {-INFINITY, 0};
        if (lane < spans.n)
            total = __ldcg(spans.totals + uint64_t{first_row + g} * spans.n + lane);
        const float peak = warp_max(total.x);
        const float factor = total.y == 0 ? 0 : expf(total.x - peak);
        const float sum = warp_sum(factor * total.y);
        factors[g][lane] = factor / sum;
        if (lane == 0)
            write_lse(work, first_row + g, peak, sum);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < heads.n * head_dim; i += blockDim.x) {
        const uint32_t g = i / head_dim, d = i % head_dim;
        const float *parts = spans.out + uint64_t{first_row + g} * spans.n * head_dim + d;
        const float value = sum_of_parts(parts, spans.n, head_dim, [&](uint32_t s) { return factors[g][s]; });
        work.out[uint64_t{first_row + g} * head_dim + d] = value;
    }
}

// Block (a few query heads of a KV head, token, span).
template <typename T, int group, int pairs>
__global__ void __launch_bounds__(most_warps *warp_size)
    attend_kernel(const __grid_constant__ pi_gpu_attention work, const __grid_constant__ Spans spans) {
    PI_SHARED(uint4, shared);
    __shared__ float q[group][max_head_dim];
    __shared__ float4 weights[most_warps][group][page / 4]; // floats would be aligned as floats are
    __shared__ float2 totals[most_warps][group];
    const uint32_t token = blockIdx.y, head_dim = work.kv.head_dim;
    const uint32_t lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    const pi_gpu_step &step = work.step;
    let_next_begin();
    const Heads heads = heads_of_block<group>(work, spans);
    const uint32_t first = step.oldest[token] / page, end = step.slot[token] / page + 1;
    const uint32_t each = (end - first + spans.n - 1) / spans.n, begin = first + blockIdx.z * each;
    const WarpPages pages = {begin + warp, min(begin + each, end),
                             step.table + uint64_t{step.table_stride} * step.sequence[token],
                             blockIdx.x / spans.blocks_of_kv};
    const uint32_t page_elements = 2 * head_dim * page;
    T *k = reinterpret_cast<T *>(shared) + warp * page_elements;
    const bool any = pages.first < pages.end;
    const T *from = keys_of<T>(work.kv, pages, any ? pages.first : first);
    // What this step adds to is not there before the kernel ahead has ended; what is older is.
    const bool old = any && (pages.first + 1) * page <= step.old_length[token];
    if (!old)
        wait_for_previous();
    copy_page(k, from, head_dim, any);
    copy_page(k + head_dim * page, from + head_dim * page, head_dim, any);
    wait_for_previous();
    const float scale = 1.0f / sqrtf(static_cast<float>(head_dim));
    const float *from_q = work.q + (uint64_t{token} * work.n_heads + heads.first) * head_dim;
    for (uint32_t i = threadIdx.x; i < group * head_dim; i += blockDim.x)
        q[i / head_dim][i % head_dim] = i < heads.n * head_dim ? __ldcg(from_q + i) * scale : 0.0f;
    __syncthreads();
    Running<group, pairs> run = {};
#pragma unroll
    for (int g = 0; g < group; ++g)
        run.peak[g] = -INFINITY;
    attend_pages<T, group, pairs>(work, pages, q, reinterpret_cast<float (*)[page]>(weights[warp]), k, run);
    auto *shared_out = reinterpret_cast<float *>(shared); // in place of the pages
    const uint32_t stride = page_elements * static_cast<uint32_t>(sizeof(T)) / sizeof(float);
#pragma unroll
    for (int g = 0; g < group; ++g) {
        if (lane == 0)
            totals[warp][g] = {run.peak[g], run.sum[g]};
#pragma unroll
        for (int i = 0; i < pairs; ++i) {
            const uint32_t d = 2 * (i * warp_size + lane);
            if (d < head_dim)
                *reinterpret_cast<float2 *>(shared_out + warp * stride + g * head_dim + d) = run.out[g][i];
        }
    }
    __syncthreads();
    merge_warps<group>(work, spans, heads, shared_out, stride, totals);
    if (spans.n > 1 && is_last_block(spans.n_done + token * gridDim.x + blockIdx.x, spans.n))
        merge_spans<group>(work, spans, heads, reinterpret_cast<float (*)[page]>(weights[0]));
}

// As many warps as have room for a page each; more than one block should have it.
uint32_t warps_of_block(const pi_gpu &gpu, uint32_t page_bytes) {
    const uint32_t most_bytes = gpu.capability >= 80 ? 80u << 10 : 48u << 10;
    uint32_t n = most_warps;
    while (n > 1 && n * page_bytes > most_bytes)
        n /= 2;
    return n;
}

// One wave of blocks, two a processor; one span where there are as many without.
template <typename T, int group, int pairs>
void start_attention(pi_gpu &gpu, const pi_gpu_attention &work) {
    const uint32_t of_kv = work.n_heads / work.kv.n_kv_heads;
    Spans spans{};
    spans.blocks_of_kv = ceil_div(of_kv, group);
    const uint32_t blocks = work.kv.n_kv_heads * spans.blocks_of_kv;
    const uint32_t wanted = 2u * static_cast<uint32_t>(gpu.n_processors) / (blocks * work.step.n_tokens);
    spans.n = std::max(1u, std::min({wanted, ceil_div(work.step.most_pages, span_pages), max_spans}));
    if (spans.n > 1) {
        const uint64_t n = uint64_t{work.step.n_tokens} * work.n_heads * spans.n;
        spans.out = scratch_of<float>(gpu, gpu.partials, n * (work.kv.head_dim + 2));
        spans.totals = reinterpret_cast<float2 *>(spans.out + n * work.kv.head_dim);
        spans.n_done = counters(gpu, work.step.n_tokens * blocks);
    }
    const uint32_t page_bytes = 2 * work.kv.head_dim * page * static_cast<uint32_t>(sizeof(T));
    const uint32_t n_warps = warps_of_block(gpu, page_bytes);
    launch_early("attention", gpu, attend_kernel<T, group, pairs>, dim3(blocks, work.step.n_tokens, spans.n),
                 n_warps * warp_size, n_warps * page_bytes, work, spans);
}

template <typename T, int pairs>
void for_group(pi_gpu &gpu, const pi_gpu_attention &work) {
    const uint32_t of_kv = work.n_heads / work.kv.n_kv_heads;
    if (of_kv == 1)
        return start_attention<T, 1, pairs>(gpu, work);
    if (of_kv == 2)
        return start_attention<T, 2, pairs>(gpu, work);
    if (of_kv <= 4)
        return start_attention<T, 4, pairs>(gpu, work);
    start_attention<T, 8, pairs>(gpu, work);
}

template <typename T>
void for_head_dim(pi_gpu &gpu, const pi_gpu_attention &work) {
    if (work.kv.head_dim <= 64)
        return for_group<T, 1>(gpu, work);
    if (work.kv.head_dim <= 128)
        return for_group<T, 2>(gpu, work);
    for_group<T, 4>(gpu, work);
}

} // namespace

void attend_tokens(pi_gpu &gpu, const pi_gpu_attention &work) {
    if (work.kv.half_precision != 0)
        for_head_dim<__half>(gpu, work);
    else
        for_head_dim<float>(gpu, work);
}

} // namespace pi_cuda
