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

// Memory answers after some 100 ns, in which 4 KiB could have come. Rows are fetched at least one group ahead
// of their use, short ones several; to rely on the processor's own prefetcher costs half the bandwidth or
// more, because it starts anew in every row.
constexpr int64_t prefetch_bytes = 8192;
constexpr int64_t cache_line = 64;

// in rows, a multiple of group_rows
inline int64_t prefetch_distance(int64_t row_bytes) {
    return group_rows * (1 + prefetch_bytes / (group_rows * row_bytes));
}

// always_inline: GCC takes a function that only prefetches for one without effect and drops the call.
[[gnu::always_inline]] inline void prefetch_first(const char *const rows[group_rows]) {
    for (int64_t r = 0; r < group_rows; ++r)
        __builtin_prefetch(rows[r]);
}

// To be called for every block, after prefetch_first: the cache lines that end in or just behind this block.
template <typename Type>
[[gnu::always_inline]] inline void prefetch_block(const char *const rows[group_rows], int64_t block) {
    constexpr int64_t blocks_per_line = Type::block_bytes < cache_line ? cache_line / Type::block_bytes : 1;
    if (block % blocks_per_line != 0)
        return;
    for (int64_t r = 0; r < group_rows; ++r) {
        const char *next_line = rows[r] + block * Type::block_bytes + cache_line - 1;
        for (int64_t offset = 0; offset < Type::block_bytes; offset += cache_line) {
            __builtin_prefetch(next_line + offset);
        }
    }
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
inline void dot_group(const char *const rows[group_rows], const char *const ahead[group_rows], const float *x,
                      int64_t n_cols, float out[group_rows]) {
    vfloat sums[group_rows][2], values[block_vectors];
    for (int64_t r = 0; r < group_rows; ++r)
        sums[r][0] = sums[r][1] = vzero();
    const char *blocks[group_rows] = {rows[0], rows[1], rows[2], rows[3]};
    prefetch_first(ahead);
    for (int64_t b = 0; n_cols >= PI_QK; ++b, n_cols -= PI_QK, x += PI_QK) {
        prefetch_block<Type>(ahead, b);
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
    const int64_t distance = prefetch_distance(w->row_bytes);
    for (int64_t first = 0; first < w->n_rows; first += group_rows) {
        const char *rows[group_rows], *ahead[group_rows];
        float sums[group_rows];
        row_group(w, first, rows);
        row_group(w, first + distance, ahead);
        dot_group<Type>(rows, ahead, x, w->n_cols, sums);
        store_group(w, first, sums, out);
    }
}

// Rows with a coefficient other than 0, in the order of the matrix.
struct ActiveRows {
    static constexpr int64_t capacity = 256; // a multiple of group_rows
    const char *rows[capacity];
    float coef[capacity];
    int64_t n;
};

// Fills the list from row `first` on; returns the row to go on with.
inline int64_t collect_active(const pi_rows *w, const float *coef, int64_t first, int64_t offset,
                              ActiveRows *list) {
    list->n = 0;
    for (; first < w->n_rows && list->n < ActiveRows::capacity; ++first) {
        if (coef[first] == 0)
            continue;
        list->rows[list->n] = row_of(w, first) + offset;
        list->coef[list->n++] = coef[first];
    }
    return first;
}

// y[0, n) += coef[0] * row 0, then row 1, ...: a block of y stays in registers for all rows of the group.
template <typename Type, int64_t n_rows>
inline void axpy_group(const char *const rows[n_rows], const char *const ahead[group_rows],
                       const float coef[n_rows], int64_t n, float *y) {
    vfloat c[n_rows], w[block_vectors], sums[block_vectors];
    for (int64_t r = 0; r < n_rows; ++r)
        c[r] = vset(coef[r]);
    prefetch_first(ahead);
    int64_t b = 0;
    for (; n >= PI_QK; n -= PI_QK, y += PI_QK, ++b) {
        prefetch_block<Type>(ahead, b);
        F32::unpack(y, sums);
        for (int64_t r = 0; r < n_rows; ++r) {
            Type::unpack(rows[r] + b * Type::block_bytes, w);
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
        unpack_first<Type>(rows[r] + b * Type::block_bytes, n, w);
        for (int64_t j = 0; j < block_vectors; ++j)
            sums[j] = vfma(c[r], w[j], sums[j]);
    }
    store_first(y, n, sums);
}

template <typename Type>
void axpy_list(const ActiveRows *list, int64_t n, float *y) {
    const int64_t distance = prefetch_distance((n + PI_QK - 1) / PI_QK * Type::block_bytes);
    for (int64_t first = 0; first < list->n; first += group_rows) {
        const char *ahead[group_rows];
        for (int64_t r = 0; r < group_rows; ++r) {
            const int64_t next = first + distance + r;
            ahead[r] = list->rows[next < list->n ? next : list->n - 1];
        }
        const char *const *rows = list->rows + first;
        const float *coef = list->coef + first;
        if (list->n - first >= group_rows) {
            axpy_group<Type, group_rows>(rows, ahead, coef, n, y);
        } else {
            for (int64_t r = 0; r < list->n - first; ++r)
                axpy_group<Type, 1>(rows + r, ahead, coef + r, n, y);
        }
    }
}

// Rows with a coefficient of 0 are passed over: they cost neither time nor a bit of y.
template <typename Type>
void axpy(const pi_rows *w, const float *coef, int64_t begin, int64_t n, float *y) {
    const int64_t offset = begin / PI_QK * Type::block_bytes;
    ActiveRows list;
    for (int64_t first = 0; first < w->n_rows;) {
        first = collect_active(w, coef, first, offset, &list);
        axpy_list<Type>(&list, n, y);
    }
}

} // namespace
