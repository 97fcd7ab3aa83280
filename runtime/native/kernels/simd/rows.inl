// rows.inl: dequantise, dot product and axpy of weight rows in float, for every type that can unpack a block
// of 32 elements into vectors. Rows go in groups; a group that is not full repeats its last row (dot) or
// shrinks (axpy), so that a row's bits do not depend on its neighbours.

#pragma once

#include "floats.inl"

namespace {

constexpr int64_t group_rows = 4;

inline const char *row_of(const pi_rows *w, int64_t i) {
    return static_cast<const char *>(w->base) + (w->index ? w->index[i] : i) * w->row_bytes;
}

// Rows first .. first + 3 of the list, the last one repeated beyond its end.
inline void row_group(const pi_rows *w, int64_t first, const char *rows[group_rows]) {
    for (int64_t r = 0; r < group_rows; ++r)
        rows[r] = row_of(w, first + r < w->n_rows ? first + r : w->n_rows - 1);
}

inline void store_group(const pi_rows *w, int64_t first, const float sums[group_rows], float *out) {
    for (int64_t r = 0; r < group_rows && first + r < w->n_rows; ++r)
        out[first + r] = sums[r];
}

// The first n elements of a block, zeros after.
template <typename Type>
inline void unpack_first(const void *block, int64_t n, vfloat out[block_vectors]) {
    if constexpr (Type::any_length) {
        Type::unpack_part(block, n, out);
    } else { // a block is whole in the file: reading all of it is safe
        Type::unpack(block, out);
    }
}

inline void store_first(float *out, int64_t n, const vfloat values[block_vectors]) {
    for (int64_t j = 0; j < block_vectors && n > 0; ++j, n -= lanes) {
        if (n >= lanes) {
            vstore(out + j * lanes, values[j]);
        } else {
            vstore_part(out + j * lanes, n, values[j]);
        }
    }
}

template <typename Type>
void dequantize(const void *row, int64_t begin, int64_t n, float *out) {
    const char *block = static_cast<const char *>(row) + begin / PI_QK * Type::block_bytes;
    vfloat values[block_vectors];
    for (; n >= PI_QK; n -= PI_QK, block += Type::block_bytes, out += PI_QK) {
        Type::unpack(block, values);
        for (int64_t j = 0; j < block_vectors; ++j)
            vstore(out + j * lanes, values[j]);
    }
    if (n > 0) {
        unpack_first<Type>(block, n, values);
        store_first(out, n, values);
    }
}

// sums[r] += block r . x[0, n); even and odd vectors of a block are kept apart, so that twice as many sums
// run.
template <typename Type>
inline void dot_blocks(const char *const blocks[group_rows], const vfloat x[block_vectors], int64_t n,
                       vfloat sums[group_rows][2]) {
    for (int64_t r = 0; r < group_rows; ++r) {
        vfloat w[block_vectors];
        if (n == PI_QK) {
            Type::unpack(blocks[r], w);
        } else {
            unpack_first<Type>(blocks[r], n, w);
        }
        for (int64_t j = 0; j < block_vectors; ++j)
            sums[r][j % 2] = vfma(w[j], x[j], sums[r][j % 2]);
    }
}

template <typename Type>
inline void dot_group(const char *const rows[group_rows], const float *x, int64_t n_cols,
                      float out[group_rows]) {
    vfloat sums[group_rows][2], values[block_vectors];
    for (int64_t r = 0; r < group_rows; ++r)
        sums[r][0] = sums[r][1] = vzero();
    const char *blocks[group_rows] = {rows[0], rows[1], rows[2], rows[3]};
    for (; n_cols >= PI_QK; n_cols -= PI_QK, x += PI_QK) {
        F32::unpack(x, values);
        dot_blocks<Type>(blocks, values, PI_QK, sums);
        for (int64_t r = 0; r < group_rows; ++r)
            blocks[r] += Type::block_bytes;
    }
    if (n_cols > 0) {
        F32::unpack_part(x, n_cols, values);
        dot_blocks<Type>(blocks, values, n_cols, sums);
    }
    for (int64_t r = 0; r < group_rows; ++r)
        out[r] = vsum(vadd(sums[r][0], sums[r][1]));
}

template <typename Type>
void dot_f32(const pi_rows *w, const float *x, float *out) {
    for (int64_t first = 0; first < w->n_rows; first += group_rows) {
        const char *rows[group_rows];
        float sums[group_rows];
        row_group(w, first, rows);
        dot_group<Type>(rows, x, w->n_cols, sums);
        store_group(w, first, sums, out);
    }
}

// y[0, n) += coef[0] * row 0, then row 1, ...: a block of y stays in registers for all rows of the group.
template <typename Type, int64_t n_rows>
inline void axpy_group(const char *const rows[n_rows], const float coef[n_rows], int64_t n, float *y) {
    vfloat c[n_rows], w[block_vectors], sums[block_vectors];
    for (int64_t r = 0; r < n_rows; ++r)
        c[r] = vset(coef[r]);
    int64_t offset = 0;
    for (; n >= PI_QK; n -= PI_QK, y += PI_QK, offset += Type::block_bytes) {
        F32::unpack(y, sums);
        for (int64_t r = 0; r < n_rows; ++r) {
            Type::unpack(rows[r] + offset, w);
            for (int64_t j = 0; j < block_vectors; ++j)
                sums[j] = vfma(c[r], w[j], sums[j]);
        }
        for (int64_t j = 0; j < block_vectors; ++j)
            vstore(y + j * lanes, sums[j]);
    }
    if (n <= 0)
        return;
    F32::unpack_part(y, n, sums);
    for (int64_t r = 0; r < n_rows; ++r) {
        unpack_first<Type>(rows[r] + offset, n, w);
        for (int64_t j = 0; j < block_vectors; ++j)
            sums[j] = vfma(c[r], w[j], sums[j]);
    }
    store_first(y, n, sums);
}

// Rows with a coefficient of 0 are passed over: they cost neither time nor a bit of y.
template <typename Type>
void axpy(const pi_rows *w, const float *coef, int64_t begin, int64_t n, float *y) {
    const char *rows[group_rows];
    float coefs[group_rows];
    int64_t filled = 0;
    for (int64_t i = 0; i < w->n_rows; ++i) {
        if (coef[i] == 0)
            continue;
        rows[filled] = row_of(w, i) + begin / PI_QK * Type::block_bytes;
        coefs[filled++] = coef[i];
        if (filled < group_rows)
            continue;
        axpy_group<Type, group_rows>(rows, coefs, n, y);
        filled = 0;
    }
    for (int64_t r = 0; r < filled; ++r)
        axpy_group<Type, 1>(rows + r, coefs + r, n, y);
}

} // namespace
