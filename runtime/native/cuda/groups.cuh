// groups.cuh: products of a pair of rows with a vector that is all in shared memory, by a group of lanes of
// any size: a part of a warp, or a few warps.
#pragma once

#include "vectors.cuh"

namespace pi_cuda {

struct Group {
    uint32_t lanes;
    uint32_t lane;
};

// The group's first slices of a pair on their way.
template <int type>
__device__ __forceinline__ void begin_group(Ahead<type> &ahead, const Group &group, const RowPair &rows,
                                            uint32_t n_slices) {
#pragma unroll
    for (uint32_t d = 0; d < Ahead<type>::depth; ++d)
        ahead.load(d, rows, d * group.lanes + group.lane, n_slices);
}

// sum += the lane's part of two rows . the vector. The first slices are on their way, and in the end those of
// the next rows, of which next_slices are wanted, at least one.
template <int type>
__device__ __forceinline__ void multiply_group(Ahead<type> &ahead, const Group &group, const RowPair &rows,
                                               uint32_t n_slices, const RowPair &next, uint32_t next_slices,
                                               const Staged &vector, float (&sum)[gemv_rows][1]) {
    const uint32_t at_once = Ahead<type>::depth * group.lanes;
    for (uint32_t at = 0; at < n_slices; at += at_once) {
        const bool more = at + at_once < n_slices;
        const RowPair from = choose(more, rows, next);
        const uint32_t from_begin = more ? at + at_once : 0, from_end = more ? n_slices : next_slices;
#pragma unroll
        for (uint32_t d = 0; d < Ahead<type>::depth; ++d) {
            const uint32_t slice = at + d * group.lanes + group.lane, of_row = min(slice, n_slices - 1);
            float part[gemv_rows][1] = {};
            if constexpr (is_quantised<type>)
                add_rounded<type, 1>(ahead.packed[d], vector, of_row, part);
            else
                add_floats<type, 1>(ahead.packed[d], vector, of_row, part);
#pragma unroll
            for (int r = 0; r < gemv_rows; ++r)
                sum[r][0] += slice < n_slices ? part[r][0] : 0.0f;
            ahead.load(d, from, from_begin + d * group.lanes + group.lane, from_end);
        }
    }
}

} // namespace pi_cuda
