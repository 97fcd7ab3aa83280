// neon_many_q8.inl: rows of a quantised matrix times many tokens' int8 activations, in cells of 4 rows x 4
// tokens x 16 columns. The including file has defined what a cell looks like:
//   pack_cell(rows, out)         out [4] = sixteen signed bytes of each of four rows
//   multiply_cell(w, x, acc)     acc [4] int32 += a packed cell times sixteen bytes of each of four tokens, x
//   sums_of_token(acc, t)        [4 rows] of them
// Sums of integers are exact, so that these may differ in everything but their result.

#pragma once

#include "many_q8.inl"

namespace {

constexpr int64_t cell = 4; // rows, tokens
constexpr int64_t cell_columns = 16;
constexpr int64_t strip_rows = 32;
constexpr int64_t strip_columns = 512; // 24 KiB in all: they stay in L1
constexpr int64_t tile_cells = 2;      // 2 x 4 integer and 2 x 4 float sums, 4 vectors of tokens

// 32 rows of strip_columns columns: value = scale * q + low.
struct alignas(64) Strip {
    int8x16_t q[strip_columns / cell_columns][strip_rows / cell][4];
    float scale[strip_columns / 16][strip_rows]; // [sub-block]
    float low[strip_columns / 16][strip_rows];
};

// The q that stands for 0, or 0 itself where there are minima. It is subtracted when a strip is packed.
template <typename Type>
constexpr int8_t zero_of() {
    if constexpr (requires { Type::zero; }) {
        return Type::zero;
    } else {
        return 0; // signed bytes
    }
}

template <typename Type>
constexpr bool has_low() {
    if constexpr (requires { Type::zero; }) {
        return Type::zero == 0;
    } else {
        return false;
    }
}

// Column group i and on of a block of four rows, whose cells lie `strip_rows / cell` apart.
template <typename Type, int i>
[[gnu::always_inline]] inline void pack_bytes(const void *const blocks[4],
                                              int8x16_t (*q)[strip_rows / cell][4]) {
    const vbytes bytes = Type::template bytes<i>(blocks);
    int8x16_t rows[4];
    for (int64_t r = 0; r < 4; ++r)
        rows[r] = vsubq_s8(vreinterpretq_s8_u8(bytes.row[r]), vdupq_n_s8(zero_of<Type>()));
    pack_cell(rows, (*q)[0]);
    if constexpr (cell_columns * (i + 1) < elements_of<Type>)
        pack_bytes<Type, i + 1>(blocks, q + 1);
}

// Of one block of four rows, into four columns of `scale` and `low` [sub-block].
template <typename Type>
inline void pack_scales(const void *const blocks[4], float (*scale)[strip_rows], float (*low)[strip_rows]) {
    if constexpr (KQuant<Type>) {
        SubScales factors;
        Type::scales(blocks, &factors);
        for (int64_t s = 0; s < PI_QK_K / Type::sub_elements; ++s) {
            vstore(scale[s], vload(factors.scale[s]));
            if constexpr (has_low<Type>())
                vstore(low[s], vnegq_f32(vload(factors.low[s])));
        }
    } else if constexpr (Type::shifted) {
        vrows d, shift;
        Type::scales(blocks, &d, &shift);
        vstore(scale[0], d);
        vstore(low[0], shift);
    } else {
        vrows d;
        Type::scales(blocks, &d);
        vstore(scale[0], d);
    }
}

// Rows `row` and on (the last one repeated), n blocks from `column`.
template <typename Type>
void pack_strip(const pi_rows *w, int64_t row, int64_t column, int64_t n_blocks, Strip *strip) {
    constexpr int64_t subs = elements_of<Type> / sub_elements_of<Type>;
    constexpr int64_t cells = elements_of<Type> / cell_columns;
    for (int64_t r = 0; r < strip_rows; r += cell) {
        const void *blocks[4];
        for (int64_t i = 0; i < 4; ++i) {
            const int64_t at = row + r + i < w->n_rows ? row + r + i : w->n_rows - 1;
            blocks[i] = row_of(w, at) + column / elements_of<Type> * Type::block_bytes;
        }
        for (int64_t b = 0; b < n_blocks; ++b) {
            pack_bytes<Type, 0>(
                blocks, reinterpret_cast<int8x16_t(*)[strip_rows / cell][4]>(strip->q[b * cells][r / cell]));
            pack_scales<Type>(blocks, reinterpret_cast<float (*)[strip_rows]>(&strip->scale[b * subs][r]),
                              reinterpret_cast<float (*)[strip_rows]>(&strip->low[b * subs][r]));
            for (int64_t i = 0; i < 4; ++i)
                blocks[i] = static_cast<const char *>(blocks[i]) + Type::block_bytes;
        }
    }
}

// out[t * out_stride + r] of rows r < n_rows of the strip's cells first_cell and on, tokens t < n_tokens: set
// where `first`, else added to.
template <typename Type>
[[gnu::noinline]] void multiply_tile(const Strip &strip, int64_t first_cell, const TokenSlice &x,
                                     int64_t n_tokens, int64_t n_columns, bool first, int64_t n_rows,
                                     float *out, int64_t out_stride) {
    constexpr int64_t sub_elements = sub_elements_of<Type>;
    vfloat sums[cell][tile_cells];
    int64_t token[cell]; // the last one repeated
    for (int64_t t = 0; t < cell; ++t) {
        token[t] = t < n_tokens ? t : n_tokens - 1;
        for (int64_t c = 0; c < tile_cells; ++c) {
            const int64_t left = n_rows - c * cell;
            const float *row = out + token[t] * out_stride + c * cell;
            sums[t][c] = first || left <= 0 ? vzero() : left < cell ? vload_part(row, left) : vload(row);
        }
    }
    for (int64_t sub = 0; sub < n_columns / sub_elements; ++sub) {
        int32x4_t acc[tile_cells][4];
        for (int64_t c = 0; c < tile_cells; ++c) {
            for (int64_t i = 0; i < 4; ++i)
                acc[c][i] = vdupq_n_s32(0);
        }
        for (int64_t k = sub * sub_elements; k < (sub + 1) * sub_elements; k += cell_columns) {
            int8x16_t tokens[cell];
            for (int64_t t = 0; t < cell; ++t)
                tokens[t] = vld1q_s8(x.q + token[t] * x.q_stride + k);
            for (int64_t c = 0; c < tile_cells; ++c)
                multiply_cell(strip.q[k / cell_columns][first_cell + c], tokens, acc[c]);
        }
        for (int64_t c = 0; c < tile_cells; ++c) {
            const vfloat scale = vload(&strip.scale[sub][(first_cell + c) * cell]);
            const vfloat low = has_low<Type>() ? vload(&strip.low[sub][(first_cell + c) * cell]) : vzero();
            for (int64_t t = 0; t < cell; ++t) {
                const vfloat d = vset(x.d[token[t] * x.d_stride + sub * sub_elements / PI_QK]);
                const vfloat dots = vcvtq_f32_s32(sums_of_token(acc[c], t));
                sums[t][c] = vfma(scale, vmul(d, dots), sums[t][c]);
                if constexpr (has_low<Type>())
                    sums[t][c] = vfma(low, vset(x.s[token[t] * x.s_stride + sub]), sums[t][c]);
            }
        }
    }
    for (int64_t t = 0; t < n_tokens; ++t) {
        for (int64_t c = 0; c < tile_cells; ++c) {
            const int64_t left = n_rows - c * cell;
            float *row = out + t * out_stride + c * cell;
            if (left >= cell) {
                vstore(row, sums[t][c]);
            } else {
                vstore_part(row, left, sums[t][c]);
            }
        }
    }
}

template <typename Type>
void many_q8(const pi_rows *w, const pi_q8_vector *x, int64_t n_tokens, float *out, int64_t out_stride) {
    constexpr int64_t tile_rows = tile_cells * cell;
    Strip strip;
    for (int64_t row = 0; row < w->n_rows; row += strip_rows) {
        const int64_t n_rows = w->n_rows - row < strip_rows ? w->n_rows - row : strip_rows;
        for (int64_t column = 0; column < w->n_cols; column += strip_columns) {
            const int64_t rest = w->n_cols - column, n = rest < strip_columns ? rest : strip_columns;
            pack_strip<Type>(w, row, column, n / elements_of<Type>, &strip);
            for (int64_t token = 0; token < n_tokens; token += cell) {
                const TokenSlice slice = token_slice<Type>(x, w->n_cols, token, column);
                const int64_t n_each = n_tokens - token < cell ? n_tokens - token : cell;
                for (int64_t r = 0; r < n_rows; r += tile_rows) {
                    multiply_tile<Type>(strip, r / cell, slice, n_each, n, column == 0, n_rows - r,
                                        out + token * out_stride + row + r, out_stride);
                }
            }
        }
    }
}

} // namespace
