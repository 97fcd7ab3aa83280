// top.cu: the largest logits of rows, in order, and the sum that makes probabilities of them.
//
// A block finds the largest ones of its part of a row; the last block of a row finds those of all parts. Both
// do it by a threshold that leaves few more than are wanted, and count for each of these how many are larger.
#include "device.cuh"
#include "operations.h"

#include <algorithm>

namespace pi_cuda {
namespace {

constexpr uint32_t threads = 512;
constexpr uint32_t block_logits = PI_GPU_TOP_LOGITS;
constexpr uint32_t each = block_logits / threads; // logits of a thread
constexpr uint32_t all_lanes = 0xffffffffu;

static_assert(PI_MAX_TOP <= threads, "every key of a threshold's thread is one group");

// A logit's place in the order: its value, then the smaller token. 0: none.
using Key = unsigned long long;
struct alignas(16) TwoKeys {
    Key a, b;
};

struct Top {
    const float *logits; // [n_rows, n_vocab]
    uint32_t n_vocab;
    uint32_t n_top;
    uint32_t group;   // lanes that hand in one key for the threshold
    Key *lists;       // [n_rows, gridDim.x, n_top] of every block
    float2 *sums;     // [n_rows, gridDim.x] its largest logit, and the sum of exp(logit - largest)
    uint32_t *n_done; // [n_rows] zero
    uint32_t *out;    // [n_rows, 2 n_top + 1]
};

__device__ Key key_of(float logit, uint32_t token) {
    const uint32_t bits = __float_as_uint(logit);
    uint32_t order = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
    if (logit == 0)
        order = 0x80000000u; // both zeros are one value
    if (logit != logit)
        order = 0xffffffffu;
    return Key{order} << 32 | ~token;
}

__device__ uint32_t token_of(Key key) {
    return ~static_cast<uint32_t>(key);
}

// How many of keys [n] are larger; keys[n] is 0 where n is odd.
__device__ uint32_t rank_of(Key key, const Key *keys, uint32_t n) {
    uint32_t rank = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < n; i += 2) {
        const TwoKeys two = *reinterpret_cast<const TwoKeys *>(keys + i);
        rank += (two.a > key ? 1u : 0u) + (two.b > key ? 1u : 0u);
    }
    return rank;
}

// For whole warps: puts the keys of lanes that keep theirs behind keys [*n].
__device__ void append(Key key, bool keep, Key *keys, uint32_t *n) {
    const uint32_t lane = threadIdx.x % warp_size, kept = __ballot_sync(all_lanes, keep);
    uint32_t at = 0;
    if (lane == 0 && kept != 0)
        at = atomicAdd(n, static_cast<uint32_t>(__popc(kept)));
    at = __shfl_sync(all_lanes, at, 0) + static_cast<uint32_t>(__popc(kept & ((1u << lane) - 1)));
    if (keep)
        keys[at] = key;
}

// The n_top largest of keys [n], n <= block_logits, in order at their beginning, for all threads; returns how
// many.
__device__ uint32_t keep_largest(Key *keys, uint32_t n, uint32_t n_top) {
    Key mine[each];
    uint32_t rank[each];
    if (threadIdx.x == 0)
        keys[n] = 0;
    __syncthreads();
#pragma unroll
    for (uint32_t j = 0; j < each; ++j) {
        const uint32_t i = threadIdx.x + j * threads;
        mine[j] = i < n ? keys[i] : 0;
        rank[j] = i < n ? rank_of(mine[j], keys, n) : n_top;
    }
    __syncthreads();
#pragma unroll
    for (uint32_t j = 0; j < each; ++j) {
        if (rank[j] < n_top)
            keys[rank[j]] = mine[j];
    }
    __syncthreads();
    return min(n, n_top);
}

// A lower bound of the n_top-th largest key of the block: that of the groups' largest ones. keys is scratch.
__device__ Key lower_bound(const Top &work, Key largest, Key *keys) {
    __shared__ Key bound;
    const uint32_t n_groups = threads / work.group;
    for (uint32_t offset = 1; offset < work.group; offset *= 2)
        largest = max(largest, __shfl_xor_sync(all_lanes, largest, static_cast<int>(offset)));
    if (threadIdx.x % work.group == 0)
        keys[threadIdx.x / work.group] = largest;
    if (threadIdx.x == 0)
        bound = 0;
    __syncthreads();
    if (threadIdx.x < n_groups && rank_of(keys[threadIdx.x], keys, n_groups) == work.n_top - 1)
        bound = keys[threadIdx.x]; // of several threads only where it is 0
    __syncthreads();
    return bound;
}

// This block's part of the row: every gridDim.x-th piece, since tokens that are alike have numbers that are.
__device__ void select_part(const Top &work, Key *keys, uint32_t *n_keys, float *shared) {
    const float *row = work.logits + uint64_t{work.n_vocab} * blockIdx.y;
    float logit[each], largest = -INFINITY, sum = 0;
    Key key[each], largest_key = 0;
    if (threadIdx.x == 0)
        *n_keys = 0;
#pragma unroll
    for (uint32_t j = 0; j < each; ++j) {
        const uint32_t token = threadIdx.x + threads * (blockIdx.x + gridDim.x * j);
        logit[j] = token < work.n_vocab ? row[token] : -INFINITY;
        key[j] = token < work.n_vocab ? key_of(logit[j], token) : 0;
        largest = fmaxf(largest, logit[j]);
        largest_key = max(largest_key, key[j]);
    }
    const Key bound = lower_bound(work, largest_key, keys);
#pragma unroll
    for (uint32_t j = 0; j < each; ++j)
        append(key[j], key[j] != 0 && key[j] >= bound, keys, n_keys);
    __syncthreads();
    const uint32_t n = keep_largest(keys, *n_keys, work.n_top);
    const uint64_t part = uint64_t{gridDim.x} * blockIdx.y + blockIdx.x;
    for (uint32_t i = threadIdx.x; i < work.n_top; i += threads)
        work.lists[part * work.n_top + i] = i < n ? keys[i] : 0;
    largest = block_max(largest, shared);
#pragma unroll
    for (uint32_t j = 0; j < each; ++j)
        sum += logit[j] == -INFINITY ? 0.0f : expf(logit[j] - largest);
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0)
        work.sums[part] = {largest, sum};
}

// The row's largest keys, in order, from all parts'; returns how many.
__device__ uint32_t merge_parts(const Top &work, Key *keys, uint32_t *n_keys) {
    const uint32_t n_lists = gridDim.x, total = n_lists * work.n_top;
    const Key *lists = work.lists + uint64_t{total} * blockIdx.y;
    // The heads of all lists first, about twice as many as are wanted; what follows is seldom larger.
    const uint32_t first = min(threads, (2 * work.n_top + n_lists - 1) / n_lists * n_lists);
    uint32_t n = 0;
    for (uint32_t begin = 0, end = first; begin < total; begin = end, end += threads) {
        const uint32_t i = begin + threadIdx.x;
        const Key key = i < min(end, total) ? lists[i % n_lists * work.n_top + i / n_lists] : 0;
        const Key bound = n == work.n_top ? keys[n - 1] : 0;
        if (threadIdx.x == 0)
            *n_keys = n;
        __syncthreads();
        append(key, key > bound, keys, n_keys);
        __syncthreads();
        const bool none = *n_keys == n;
        if (none && end - begin >= n_lists)
            break; // lists descend
        n = keep_largest(keys, *n_keys, work.n_top);
    }
    return n;
}

// log of the sum of exp(logit - the largest) over the row.
__device__ float merge_sums(const Top &work, float *shared) {
    const float2 *sums = work.sums + uint64_t{gridDim.x} * blockIdx.y;
    float largest = -INFINITY, sum = 0;
    for (uint32_t i = threadIdx.x; i < gridDim.x; i += threads)
        largest = fmaxf(largest, sums[i].x);
    largest = block_max(largest, shared);
    for (uint32_t i = threadIdx.x; i < gridDim.x; i += threads)
        sum += sums[i].y * (sums[i].x == -INFINITY ? 1.0f : expf(sums[i].x - largest));
    return logf(block_sum(sum, shared));
}

__global__ void top_kernel(Top work) {
    alignas(16) __shared__ Key keys[block_logits + 2];
    __shared__ uint32_t n_keys;
    __shared__ float shared[warp_size];
    select_part(work, keys, &n_keys, shared);
    if (!is_last_block(work.n_done + blockIdx.y, gridDim.x))
        return;
    const uint32_t n = merge_parts(work, keys, &n_keys);
    const float log_sum = merge_sums(work, shared);
    const float *row = work.logits + uint64_t{work.n_vocab} * blockIdx.y;
    uint32_t *out = work.out + (2 * uint64_t{work.n_top} + 1) * blockIdx.y;
    for (uint32_t i = threadIdx.x; i < work.n_top; i += threads) {
        const uint32_t token = i < n ? token_of(keys[i]) : 0;
        out[i] = i < n ? token : UINT32_MAX;
        out[work.n_top + i] = __float_as_uint(i < n ? row[token] : -INFINITY);
    }
    if (threadIdx.x == 0)
        out[2 * work.n_top] = __float_as_uint(log_sum);
}

// Twice as many groups as logits are wanted: then few more than these are above the threshold.
uint32_t group_of(uint32_t n_top) {
    uint32_t group = warp_size;
    while (group > 1 && threads / group < 2 * n_top)
        group /= 2;
    return group;
}

} // namespace

int32_t top(pi_gpu *gpu, const float *logits, uint32_t n_rows, uint32_t n_vocab, uint32_t n_top,
            uint32_t *out) {
    return operate(gpu, [&](pi_gpu &device) {
        if (n_top == 0 || n_top > PI_MAX_TOP)
            throw Failure{PI_FAILURE, std::to_string(n_top) + " largest logits: the device finds 1 to " +
                                          std::to_string(PI_MAX_TOP)};
        const uint32_t n_parts = ceil_div(n_vocab, block_logits);
        const uint32_t most = std::min(n_rows, PI_GPU_TOP_ROWS);
        Top work{};
        work.lists = scratch_of<Key>(device, device.partials, uint64_t{most} * n_parts * (n_top + 1));
        work.sums = reinterpret_cast<float2 *>(work.lists + uint64_t{most} * n_parts * n_top);
        work.n_done = counters(device, most);
        work.n_vocab = n_vocab;
        work.n_top = n_top;
        work.group = group_of(n_top);
        for (uint32_t begin = 0; begin < n_rows; begin += most) {
            work.logits = logits + uint64_t{n_vocab} * begin;
            work.out = out + (2 * uint64_t{n_top} + 1) * begin;
            launch("finding the largest logits", device, top_kernel,
                   dim3(n_parts, std::min(most, n_rows - begin)), threads, 0, work);
        }
    });
}

} // namespace pi_cuda
