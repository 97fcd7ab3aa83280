// rows.inl: dequantise, dot product and axpy of weight rows in float, for every type that can unpack a block
// of 32 elements into vectors. Rows go in groups; a group that is not full repeats its last row (dot) or
// shrinks (axpy), so that a row's bits do not depend on its neighbours.

#pragma once

#include "floats.inl"
#include "prefetch.inl"

namespace {

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
inline void dot_group(const char *const *rows, Lookahead ahead, const float *x, int64_t n_cols,
                      float out[group_rows]) {
    const int64_t n_blocks = n_cols / PI_QK, rest = n_cols % PI_QK;
    vfloat sums[group_rows][2], values[block_vectors];
    for (int64_t r = 0; r < group_rows; ++r)
        sums[r][0] = sums[r][1] = vzero();
    const char *blocks[group_rows] = {rows[0], rows[1], rows[2], rows[3]};
    for_each_block<Type>(rows, n_blocks, ahead, [&](int64_t b) {
        F32::unpack(x + b * PI_QK, values);
        dot_blocks<Type>(blocks, values, PI_QK, sums);
        for (int64_t r = 0; r < group_rows; ++r)
            blocks[r] += Type::block_bytes;
    });
    if (rest > 0) {
        F32::unpack_part(x + n_blocks * PI_QK, rest, values);
        dot_blocks<Type>(blocks, values, rest, sums);
    }
    for (int64_t r = 0; r < group_rows; ++r)
        out[r] = vsum(vadd(sums[r][0], sums[r][1]));
}

// group(rows, ahead, sums [group_rows]) for every four rows of w; out [n_rows] receives the sums.
template <typename Type, typename Group>
[[gnu::always_inline]] inline void for_each_group(const pi_rows *w, int64_t block_elements, float *out,
                                                  Group group) {
    const int64_t n_blocks = w->n_cols / block_elements;
    const Lookahead ahead = look_ahead(w->n_rows, n_blocks, Type::block_bytes);
    const char *rows[list_rows + rows_ahead];
    for (int64_t first = 0; first < w->n_rows; first += list_rows) {
        const int64_t n = w->n_rows - first < list_rows ? w->n_rows - first : list_rows;
        list_matrix_rows(w, first, n, rows);
        if (first == 0)
            prefetch_start<Type>(rows, n, n_blocks, ahead);
        for (int64_t i = 0; i < n; i += group_rows) {
            float sums[group_rows];
            group(rows + i, ahead, sums);
            for (int64_t r = 0; r < group_rows && i + r < n; ++r)
                out[first + i + r] = sums[r];
        }
    }
}

template <typename Type>
void dot_f32(const pi_rows *w, const float *x, float *out) {
    for_each_group<Type>(w, PI_QK, out, [&](const char *const *rows, Lookahead ahead, float *sums) {
        dot_group<Type>(rows, ahead, x, w->n_cols, sums);
    });
}

// Rows with a coefficient other than 0, in the order of the matrix.
struct ActiveRows {
    const char *rows[list_rows + rows_ahead];
    float coef[list_rows];
    int64_t n;
};

// Appends rows from `first` on until the list is full; returns the row to go on with. Beyond its end the list
// has the rows of the next call, then its last one again and again.
inline int64_t append_active(const pi_rows *w, const float *coef, int64_t first, int64_t offset,
                             ActiveRows *list) {
    for (; first < w->n_rows && list->n < list_rows; ++first) {
        list->rows[list->n] = row_of(w, first) + offset;
        list->coef[list->n] = coef[first];
        list->n += coef[first] != 0; // no branch: which neurons fire cannot be predicted
    }
    const char *base = static_cast<const char *>(w->base) + offset;
    for (int64_t i = 0; i < rows_ahead && list->n > 0; ++i) {
        list->rows[list->n + i] =
            i < w->n_ahead ? base + w->ahead[i] * w->row_bytes : list->rows[list->n - 1];
    }
    return first;
}

// Moves rows [begin, n) to the front.
inline void drop_rows(ActiveRows *list, int64_t begin) {
    for (int64_t i = begin; i < list->n; ++i) {
        list->rows[i - begin] = list->rows[i];
        list->coef[i - begin] = list->coef[i];
    }
    list->n -= begin;
}

// y[0, n) += coef[0] * row 0, then row 1, ...: a block of y stays in registers for all rows of the group.
template <typename Type, int64_t n_rows>
inline void axpy_group(const char *const *rows, Lookahead ahead, const float coef[n_rows], int64_t n,
                       float *y) {
    const int64_t n_blocks = n / PI_QK, rest = n % PI_QK;
    vfloat c[n_rows], w[block_vectors], sums[block_vectors];
    for (int64_t r = 0; r < n_rows; ++r)
        c[r] = vset(coef[r]);
    for_each_block<Type>(rows, n_blocks, ahead, [&](int64_t b) {
        F32::unpack(y + b * PI_QK, sums);
        for (int64_t r = 0; r < n_rows; ++r) {
            Type::unpack(rows[r] + b * Type::block_bytes, w);
            for (int64_t j = 0; j < block_vectors; ++j)
                sums[j] = vfma(c[r], w[j], sums[j]);
        }
        for (int64_t j = 0; j < block_vectors; ++j)
            vstore(y + b * PI_QK + j * lanes, sums[j]);
    });
    if (rest == 0)
        return;
    F32::unpack_part(y + n_blocks * PI_QK, rest, sums);
    for (int64_t r = 0; r < n_rows; ++r) {
        unpack_first<Type>(rows[r] + n_blocks * Type::block_bytes, rest, w);
        for (int64_t j = 0; j < block_vectors; ++j)
            sums[j] = vfma(c[r], w[j], sums[j]);
    }
    store_first(y + n_blocks * PI_QK, rest, sums);
}

// Rows of the list, at most `most`.
template <typename Type, int64_t most>
inline void axpy_rest(const ActiveRows *list, Lookahead ahead, int64_t n, float *y) {
    if constexpr (most > 0) {
        if (list->n == most) {
            axpy_group<Type, most>(list->rows, ahead, list->coef, n, y);
        } else {
            axpy_rest<Type, most - 1>(list, ahead, n, y);
        }
    }
}

// Rows with a coefficient of 0 are passed over: they cost neither time nor a bit of y.
template <typename Type>
void axpy(const pi_rows *w, const float *coef, int64_t begin, int64_t n, float *y) {
    const int64_t offset = begin / PI_QK * Type::block_bytes, n_blocks = n / PI_QK;
    const Lookahead ahead = look_ahead(w->n_rows, n_blocks, Type::block_bytes);
    ActiveRows list;
    list.n = 0;
    int64_t next = append_active(w, coef, 0, offset, &list);
    prefetch_start<Type>(list.rows, list.n, n_blocks, ahead);
    while (list.n >= group_rows) {
        // until the matrix ends, rows that are still to be fetched ahead stay in the list
        const int64_t limit = next < w->n_rows ? list_rows - rows_ahead : list.n;
        int64_t i = 0;
        for (; i + group_rows <= limit; i += group_rows) {
            axpy_group<Type, group_rows>(list.rows + i, ahead, list.coef + i, n, y);
        }
        drop_rows(&list, i);
        next = append_active(w, coef, next, offset, &list);
    }
    axpy_rest<Type, group_rows - 1>(&list, ahead, n, y);
}

} // namespace
