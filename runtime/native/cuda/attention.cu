// attention.cu: heads are turned, keys and values go into their pages; which kernel attends to them.
#include "attention.cuh"

#include "operations.h"

namespace pi_cuda {
namespace {

constexpr uint32_t tokens_threads = 256; // of a block that places 32 tokens
constexpr uint32_t least_tokens = 64;    // a smaller step has too few of those blocks

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

__device__ __forceinline__ void turn_query(const Placing &work, uint32_t head, uint32_t token, uint32_t first,
                                           uint32_t step) {
    float *q = work.q + (uint64_t{token} * work.n_heads + head) * work.kv.head_dim;
    for (uint32_t i = first; i < work.n_rot / 2; i += step) {
        const float2 pair = turned(work, q, token, i);
        q[2 * i] = pair.x;
        q[2 * i + 1] = pair.y;
    }
}

// Where a KV head of the token's page begins: K [head_dim, 32], V [32, head_dim].
template <typename T>
__device__ __forceinline__ T *page_of(const Placing &work, uint32_t head, uint32_t token) {
    const uint32_t page_id = work.step.table[uint64_t{work.step.table_stride} * work.step.sequence[token] +
                                             work.step.slot[token] / page];
    return reinterpret_cast<T *>(const_cast<uint8_t *>(kv_head(work.kv, page_id, head)));
}

// Block (head, token): a query head is turned where it is. Of a KV head K, turned, becomes column slot % 32
// of [head_dim, 32], V row slot % 32 of [32, head_dim].
template <typename T>
__global__ void place_kernel(const __grid_constant__ Placing work) {
    const uint32_t token = blockIdx.y, head_dim = work.kv.head_dim;
    let_next_begin();
    wait_for_previous();
    if (blockIdx.x < work.n_heads)
        return turn_query(work, blockIdx.x, token, threadIdx.x, blockDim.x);
    const uint32_t head = blockIdx.x - work.n_heads, slot = work.step.slot[token];
    T *to_k = page_of<T>(work, head, token), *to_v = to_k + head_dim * page + slot % page * head_dim;
    const uint64_t from = (uint64_t{token} * work.kv.n_kv_heads + head) * head_dim;
    for (uint32_t i = threadIdx.x; i < head_dim / 2; i += blockDim.x) {
        const float2 pair = turned(work, work.k + from, token, i);
        assign(pair.x, to_k + 2 * i * page + slot % page);
        assign(pair.y, to_k + (2 * i + 1) * page + slot % page);
        assign(work.v[from + 2 * i], to_v + 2 * i);
        assign(work.v[from + 2 * i + 1], to_v + 2 * i + 1);
    }
}

// The same of many tokens. Block (head, 32 tokens): K goes through shared memory, so that a warp writes a
// dimension of 32 tokens, which mostly lie side by side in a page.
template <typename T>
__global__ void __launch_bounds__(tokens_threads) place_tokens_kernel(const __grid_constant__ Placing work) {
    constexpr uint32_t stride = page + 1, n_warps = tokens_threads / warp_size;
    __shared__ T keys[max_head_dim * stride]; // [head_dim, stride], a column a token
    const uint32_t warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
    const uint32_t first = blockIdx.y * page, head_dim = work.kv.head_dim;
    const uint32_t n = min(static_cast<uint32_t>(page), work.step.n_tokens - first);
    let_next_begin();
    wait_for_previous();
    if (blockIdx.x < work.n_heads) {
        for (uint32_t t = warp; t < n; t += n_warps)
            turn_query(work, blockIdx.x, first + t, lane, warp_size);
        return;
    }
    const uint32_t head = blockIdx.x - work.n_heads;
    for (uint32_t t = warp; t < n; t += n_warps) {
        const uint32_t token = first + t;
        const uint64_t from = (uint64_t{token} * work.kv.n_kv_heads + head) * head_dim;
        T *to_v = page_of<T>(work, head, token) + head_dim * (page + work.step.slot[token] % page);
        for (uint32_t i = lane; i < head_dim / 2; i += warp_size) {
            const float2 pair = turned(work, work.k + from, token, i);
            assign(pair.x, keys + 2 * i * stride + t);
            assign(pair.y, keys + (2 * i + 1) * stride + t);
            assign(work.v[from + 2 * i], to_v + 2 * i);
            assign(work.v[from + 2 * i + 1], to_v + 2 * i + 1);
        }
    }
    __syncthreads();
    if (lane >= n)
        return;
    T *to_k = page_of<T>(work, head, first + lane) + work.step.slot[first + lane] % page;
    for (uint32_t d = warp; d < head_dim; d += n_warps)
        to_k[d * page] = keys[d * stride + lane];
}

template <typename T>
void start_placing(pi_gpu &gpu, const Placing &work) {
    const uint32_t n_heads = work.n_heads + work.kv.n_kv_heads, n_tokens = work.step.n_tokens;
    if (n_tokens < least_tokens || work.kv.head_dim > max_head_dim)
        return launch_early("placing heads", gpu, place_kernel<T>, dim3(n_heads, n_tokens), 64, 0, work);
    launch_early("placing heads", gpu, place_tokens_kernel<T>, dim3(n_heads, ceil_div(n_tokens, page)),
                 tokens_threads, 0, work);
}

} // namespace

int32_t place_heads(pi_gpu *gpu, const pi_gpu_kv *kv, const pi_gpu_step *step, const pi_gpu_rope *rope,
                    float *q, const float *k, const float *v) {
    return operate(gpu, [&](pi_gpu &device) {
        if (kv->head_dim % 2 != 0)
            throw Failure{PI_FAILURE, "heads of an odd number of dimensions"};
        const Placing work = {*kv, *step, rope->n_heads, rope->n_rot, rope->cosine, rope->sine, q, k, v};
        return kv->half_precision != 0 ? start_placing<__half>(device, work)
                                       : start_placing<float>(device, work);
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
