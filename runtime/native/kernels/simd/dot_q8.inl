// dot_q8.inl: dot products of quantised rows with int8 activations, four rows at a time. Every row has one
// vector of partial sums, filled block by block, and is reduced by a fixed tree: its bits do not depend on
// its neighbours.

#pragma once

#include "rows.inl"

namespace {

template <typename Type>
inline void dot_q8_group(const char *const rows[group_rows], const char *const ahead[group_rows],
                         const pi_q8_vector *x, int64_t n_blocks, float out[group_rows]) {
    const void *blocks[group_rows] = {rows[0], rows[1], rows[2], rows[3]};
    prefetch_first(ahead);
    vdots sums = zero_dots();
    vrows shifts = rows_zero();
    for (int64_t b = 0; b < n_blocks; ++b) {
        prefetch_block<Type>(ahead, b);
        vrows scale, shift;
        if constexpr (Type::shifted) {
            Type::scales(blocks, &scale, &shift);
            shifts = rows_fma(shift, rows_set(x->s[b]), shifts);
        } else {
            Type::scales(blocks, &scale);
        }
        const vdots dots = Type::dot(blocks, x->q + b * PI_QK);
        sums = add_scaled(sums, rows_mul(scale, rows_set(x->d[b])), dots);
        for (int64_t r = 0; r < group_rows; ++r) {
            blocks[r] = static_cast<const char *>(blocks[r]) + Type::block_bytes;
        }
    }
    rows_store(out, rows_add(sum_dots(sums), shifts));
}

template <typename Type>
void dot_q8(const pi_rows *w, const pi_q8_vector *x, float *out) {
    const int64_t distance = prefetch_distance(w->row_bytes);
    for (int64_t first = 0; first < w->n_rows; first += group_rows) {
        const char *rows[group_rows], *ahead[group_rows];
        float sums[group_rows];
        row_group(w, first, rows);
        row_group(w, first + distance, ahead);
        dot_q8_group<Type>(rows, ahead, x, w->n_cols / PI_QK, sums);
        store_group(w, first, sums, out);
    }
}

} // namespace
