// attention.cu: heads are turned, keys and values go into their pages; which kernel attends to them.
#include "attention.cuh"

#include "operations.h"

namespace pi_cuda {
namespace {

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
