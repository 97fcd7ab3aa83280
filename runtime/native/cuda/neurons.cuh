// neurons.cuh: a token's neurons: gates, and the ups of those that are open. Block b has neurons b, b +
// n_blocks and so on, of which the first ones fire most in many files; of these a predictor may choose.
#pragma once

#include "logits.cuh"

namespace pi_cuda {

// In one launch, or, where the types differ, in two: first the activations alone, then the ups of those that
// are not 0.
struct NeuronsLaunch {
    Vectors vectors;       // one column
    uint32_t vector_bytes; // of shared memory, for it and before it the predictor's
    const uint8_t *gate;   // or null: out holds the activations
    const uint8_t *up;     // or null: out gets the activations
    uint64_t row_stride;
    uint32_t n_rows;
    const uint32_t *mask; // bit i: neuron i is let through; or null: all are
    Logits logits;        // in place of a mask, if there are rows
    uint32_t relu;        // 1: closed up to the threshold; 0: SiLU, never closed
    float threshold;
    float *out;                              // [n_rows]
    unsigned long long *n_masked, *n_active; // added to, or null
};

// Neurons of a block, in shared memory.
struct NeuronList {
    uint32_t *row;
    float *activation;
    uint32_t *n;

    __device__ __forceinline__ void add(uint32_t i, float value) const {
        const uint32_t at = atomicAdd(n, 1u);
        row[at] = i;
        activation[at] = value;
    }
};

__device__ __forceinline__ bool is_let_through(const NeuronsLaunch &work, uint32_t i) {
    return work.mask == nullptr || (__ldcg(work.mask + i / 32) >> (i % 32) & 1) != 0;
}

// The block's neurons that are to be computed, in any order; the others become 0.
__device__ __forceinline__ void list_neurons(const NeuronsLaunch &work, const NeuronList &list) {
    for (uint32_t i = blockIdx.x + gridDim.x * threadIdx.x; i < work.n_rows; i += gridDim.x * blockDim.x) {
        const bool through = is_let_through(work, i);
        const float activation = through && work.gate == nullptr ? __ldcg(work.out + i) : 0.0f;
        if (through && (work.gate != nullptr || activation != 0))
            list.add(i, activation);
        else
            work.out[i] = 0.0f;
    }
}

// Those that the predictor lets through; waits for what comes before.
template <int type>
__device__ __forceinline__ void list_predicted(const NeuronsLaunch &work, const NeuronList &list,
                                               uint4 *shared, float *warp_sums) {
    const uint32_t n = (work.n_rows - blockIdx.x + gridDim.x - 1) / gridDim.x;
    logits_of_rows<type>(
        work.logits, n, [](uint32_t i) { return blockIdx.x + gridDim.x * i; }, shared, warp_sums,
        [&](uint32_t neuron, float logit) {
            if (logit >= work.logits.threshold)
                list.add(neuron, 0.0f);
            else
                work.out[neuron] = 0.0f;
        });
}

__device__ __forceinline__ void list_predicted(const NeuronsLaunch &work, const NeuronList &list,
                                               uint4 *shared, float *warp_sums) {
    if (work.logits.type == PI_KT_F16)
        list_predicted<PI_KT_F16>(work, list, shared, warp_sums);
    else if (work.logits.type == PI_KT_Q8_0)
        list_predicted<PI_KT_Q8_0>(work, list, shared, warp_sums);
    else
        list_predicted<PI_KT_Q5_0>(work, list, shared, warp_sums);
}

// 0 where it is closed.
__device__ __forceinline__ float activation_of(const NeuronsLaunch &work, float gate) {
    return work.relu == 0 ? silu(gate) : gate > work.threshold ? gate : 0.0f;
}

// Pair p of a list: gate and up of neuron p, or neurons 2 p and 2 p + 1 of one matrix, the last one twice
// where their number is odd.
template <int type>
__device__ __forceinline__ RowPair pair_of_list(const NeuronsLaunch &work, const NeuronList &list,
                                                const uint8_t *first, const uint8_t *second, bool one,
                                                uint32_t p) {
    const uint32_t n_blocks = work.vectors.n_cols / layouts[type].block_elements;
    const uint32_t a = list.row[one ? p : 2 * p], b = list.row[one ? p : min(2 * p + 1, *list.n - 1)];
    return {{{first + work.row_stride * a, n_blocks}, {second + work.row_stride * b, n_blocks}}};
}

template <int type>
__device__ __forceinline__ void up_products(const NeuronsLaunch &work, const NeuronList &open,
                                            Ahead<type> &ahead, BlockVectors<type, 1> &vectors) {
    const Pairs pairs = {0, gemv_warps, (*open.n + 1) / 2};
    const auto rows_of = [&](uint32_t p) {
        return pair_of_list<type>(work, open, work.up, work.up, false, p);
    };
    if (pairs.n == 0)
        return;
    begin_pairs<type, 1>(ahead, pairs, work.vectors.n_cols, rows_of);
    multiply_pairs<type, 1>(ahead, pairs, vectors, rows_of, [&](uint32_t p, const float (*sum)[1]) {
        const uint32_t lane = threadIdx.x % warp_size, at = 2 * p + lane;
        if (lane < gemv_rows && at < *open.n)
            work.out[open.row[at]] = open.activation[at] * (lane == 0 ? sum[0][0] : sum[1][0]);
    });
}

// Gates and ups at once where few gates will be closed, else gates alone, whose open ones are added to `open`
// unless there are no ups here.
template <int type>
__device__ __forceinline__ void gate_products(const NeuronsLaunch &work, const NeuronList &list,
                                              const NeuronList &open, uint32_t &n_active, Ahead<type> &ahead,
                                              BlockVectors<type, 1> &vectors) {
    const bool chosen = work.mask != nullptr || work.logits.rows != nullptr;
    const bool together = work.up != nullptr && (chosen || work.relu == 0);
    const uint8_t *second = together ? work.up : work.gate;
    const Pairs pairs = {0, gemv_warps, together ? *list.n : (*list.n + 1) / 2};
    const auto rows_of = [&](uint32_t p) {
        return pair_of_list<type>(work, list, work.gate, second, together, p);
    };
    if (pairs.n == 0)
        return;
    begin_pairs<type, 1>(ahead, pairs, work.vectors.n_cols, rows_of);
    wait_for_previous();
    multiply_pairs<type, 1>(ahead, pairs, vectors, rows_of, [&](uint32_t p, const float (*sum)[1]) {
        const uint32_t lane = threadIdx.x % warp_size, at = together ? p : 2 * p + lane;
        if (lane >= (together ? 1 : gemv_rows) || at >= *list.n)
            return;
        const float activation = activation_of(work, lane == 0 ? sum[0][0] : sum[1][0]);
        if (activation != 0)
            atomicAdd(&n_active, 1u);
        if (activation != 0 && work.up != nullptr && !together)
            open.add(list.row[at], activation);
        else
            work.out[list.row[at]] = activation == 0 ? 0.0f : together ? activation * sum[1][0] : activation;
    });
}

template <int type>
__global__ void __launch_bounds__(gemv_threads, 2)
    neurons_kernel(const __grid_constant__ NeuronsLaunch work) {
    PI_SHARED(uint4, shared);
    __shared__ float warp_sums[warp_size];
    __shared__ uint32_t n_listed, n_open, n_active;
    const uint32_t most = (work.n_rows + gridDim.x - 1) / gridDim.x;
    auto *lists =
        reinterpret_cast<uint32_t *>(shared + work.vector_bytes / 16); // rows and activations, twice
    const NeuronList list = {lists, reinterpret_cast<float *>(lists) + most, &n_listed};
    const NeuronList open = {lists + 2 * most, reinterpret_cast<float *>(lists) + 3 * most, &n_open};
    if (threadIdx.x == 0)
        n_listed = n_open = n_active = 0;
    __syncthreads();
    let_next_begin();
    if (work.mask != nullptr || work.gate == nullptr)
        wait_for_previous();
    if (work.logits.rows != nullptr)
        list_predicted(work, list, shared, warp_sums);
    else
        list_neurons(work, list);
    __syncthreads();
    BlockVectors<type, 1> vectors(work.vectors, shared, warp_sums);
    Ahead<type> ahead;
    if (work.gate != nullptr) {
        gate_products<type>(work, list, open, n_active, ahead, vectors);
        __syncthreads();
    }
    up_products<type>(work, work.gate != nullptr ? open : list, ahead, vectors);
    if (threadIdx.x != 0 || work.n_active == nullptr)
        return;
    if (work.n_masked != nullptr && n_listed > 0)
        atomicAdd(work.n_masked, static_cast<unsigned long long>(n_listed));
    if (n_active > 0)
        atomicAdd(work.n_active, static_cast<unsigned long long>(n_active));
}

template <int type>
void start_neurons(pi_gpu &gpu, NeuronsLaunch work) {
    const unsigned blocks = gemv_blocks(gpu, work.n_rows);
    work.vector_bytes = std::max(vectors_bytes<type, 1>(work.vectors.n_cols), hidden_bytes(work.logits));
    const size_t n_bytes = work.vector_bytes + 4 * sizeof(uint32_t) * ceil_div(work.n_rows, blocks);
    launch_early("a token's neurons", gpu, neurons_kernel<type>, blocks, gemv_threads, n_bytes, work);
}

} // namespace pi_cuda
