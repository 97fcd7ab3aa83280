// logits.cuh: a predictor's logits of some neurons. Its rows are short beside what a warp has on its way, so
// eight lanes compute a pair of them, and a block all of its own at once.
#pragma once

#include "vectors.cuh"

namespace pi_cuda {

constexpr uint32_t logit_lanes = 8; // of a pair of rows

struct Logits {
    const uint8_t *rows; // of fc2 [neurons, rank], or null: there is no predictor
    uint64_t row_stride;
    uint32_t type; // PI_KT_*, one that has_logits()
    uint32_t rank;
    const float *hidden; // [rank]
    float threshold;
};

// Whether the kernels of neurons know the type that the converter gives fc2, and hidden fits at once.
inline bool has_logits(uint32_t type, uint32_t rank) {
    return (type == PI_KT_F16 && rank <= vector_chunk<PI_KT_F16, 1>) ||
           ((type == PI_KT_Q8_0 || type == PI_KT_Q5_0) && rank <= vector_chunk<PI_KT_Q8_0, 1>);
}

inline Logits logits_of(const pi_gpu_predictor &of) {
    return {static_cast<const uint8_t *>(of.fc2.data),
            of.fc2.row_stride,
            of.fc2.kernel_type,
            of.fc2.n_cols,
            of.hidden,
            of.threshold};
}

// Of shared memory.
inline uint32_t hidden_bytes(const Logits &of) {
    if (of.rows == nullptr)
        return 0;
    return of.type == PI_KT_F16 ? vectors_bytes<PI_KT_F16, 1>(of.rank)
                                : vectors_bytes<PI_KT_Q8_0, 1>(of.rank);
}

// The sums of the lanes that have a pair of rows, in all of them.
__device__ __forceinline__ float logit_sum(float x) {
#pragma unroll
    for (int lanes = 1; lanes < static_cast<int>(logit_lanes); lanes *= 2)
        x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

// Calls use(row, logit) once for each of the block's rows row_of(0) .. row_of(n - 1), n > 0. The first rows
// are on their way before what comes ahead has ended.
template <int type, typename RowOf, typename Use>
__device__ __forceinline__ void logits_of_rows(const Logits &of, uint32_t n, const RowOf &row_of,
                                               uint4 *shared, float *warp_sums, const Use &use) {
    constexpr uint32_t depth = Ahead<type>::depth, at_once = depth * logit_lanes;
    const uint32_t n_slices = of.rank / Type<type>::width, n_pairs = (n + 1) / 2;
    const uint32_t lane = threadIdx.x % logit_lanes, stride = blockDim.x / logit_lanes;
    const auto rows_of = [&](uint32_t pair) {
        const uint32_t a = row_of(2 * min(pair, n_pairs - 1)),
                       n_blocks = of.rank / layouts[type].block_elements;
        const uint32_t b = row_of(min(2 * pair + 1, n - 1));
        return RowPair{{{of.rows + of.row_stride * a, n_blocks}, {of.rows + of.row_stride * b, n_blocks}}};
    };
    uint32_t pair = threadIdx.x / logit_lanes;
    RowPair rows = rows_of(pair);
    Ahead<type> ahead;
#pragma unroll
    for (uint32_t d = 0; d < depth; ++d)
        ahead.load(d, rows, d * logit_lanes + lane, n_slices);
    wait_for_previous();
    const Vectors vectors = {of.rank, 1, of.hidden, nullptr, 0.0f};
    BlockVectors<type, 1> hidden(vectors, shared, warp_sums);
    hidden.stage(0);
    for (uint32_t first = 0; first < n_pairs; first += stride, pair += stride) {
        const RowPair next = rows_of(pair + stride);
        float sum[gemv_rows][1] = {};
        for (uint32_t at = 0; at < n_slices; at += at_once) {
            const bool more = at + at_once < n_slices;
            const RowPair from = choose(more, rows, next);
            const uint32_t from_begin =
                more ? at + at_once : 0; // behind the last rows one slice, for nothing
            const uint32_t from_end = more || first + stride < n_pairs ? n_slices : 1;
#pragma unroll
            for (uint32_t d = 0; d < depth; ++d) {
                const uint32_t slice = at + d * logit_lanes + lane;
                float part[gemv_rows][1] = {};
                if constexpr (is_quantised<type>)
                    add_rounded<type, 1>(ahead.packed[d], hidden.staged, min(slice, n_slices - 1), part);
                else
                    add_floats<type, 1>(ahead.packed[d], hidden.staged, min(slice, n_slices - 1), part);
#pragma unroll
                for (int r = 0; r < gemv_rows; ++r)
                    sum[r][0] += slice < n_slices ? part[r][0] : 0.0f;
                ahead.load(d, from, from_begin + d * logit_lanes + lane, from_end);
            }
        }
        const float a = logit_sum(sum[0][0]), b = logit_sum(sum[1][0]);
        if (lane < gemv_rows && 2 * pair + lane < n)
            use(row_of(2 * pair + lane), lane == 0 ? a : b);
        rows = next;
    }
}

} // namespace pi_cuda
