// dot_q8.inl: dot products of quantised rows with int8 activations, four rows at a time. Every row has one
// vector of partial sums, filled block by block, and is reduced by a fixed tree: its bits do not depend on
// its neighbours.

#pragma once

#include "rows.inl"

namespace {

template <typename Type>
inline void dot_q8_group(const char *const *rows, Lookahead ahead, const pi_q8_vector *x, int64_t n_blocks,
                         float out[group_rows]) {
    const void *blocks[group_rows] = {rows[0], rows[1], rows[2], rows[3]};
    vdots sums = zero_dots();
    vrows shifts = rows_zero();
    for_each_block<Type>(rows, n_blocks, ahead, [&](int64_t b) {
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
    });
    rows_store(out, rows_add(sum_dots(sums), shifts));
}

template <typename Type>
void dot_q8(const pi_rows *w, const pi_q8_vector *x, float *out) {
    for_each_group<Type>(w, PI_QK, out, [&](const char *const *rows, Lookahead ahead, float *sums) {
        dot_q8_group<Type>(rows, ahead, x, w->n_cols / PI_QK, sums);
    });
}

} // namespace
