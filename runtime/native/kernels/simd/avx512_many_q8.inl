// avx512_many_q8.inl: rows of a quantised matrix times many tokens' int8 activations. Sixteen rows lie along
// a vector: their quants are laid out so that four of every row fill its 32 bit lane, and four of a token's
// are broadcast against them (vpdpbusd). So tokens are read as they are, and results leave as they are
// stored.

#pragma once

#include "many_q8.inl"

namespace {

constexpr int64_t strip_rows = 16;
constexpr int64_t n_strips = 2;
constexpr int64_t strip_columns = 512; // as many as stay in L1 with two strips
constexpr int64_t tile_tokens = 6;     // 6 x 2 integer and 6 x 2 float sums

// 16 rows of strip_columns columns. q is unsigned; the value is scale * (q - zero), or scale * q + low.
struct alignas(64) Strip {
    uint8_t q[strip_columns / 4][strip_rows][4];
    float scale[strip_columns / 16][strip_rows]; // [sub-block]
    float low[strip_columns / 16][strip_rows];
};

// The q that stands for 0; signed bytes are moved up by 128.
template <typename Type>
constexpr int zero_of() {
    if constexpr (KQuant<Type>) {
        return Type::zero;
    } else if constexpr (Type::signed_bytes) {
        return 128;
    } else {
        return Type::zero;
    }
}

template <typename Type, int i>
inline __m512i unsigned_bytes(const void *const blocks[4]) {
    const __m512i bytes = Type::template bytes<i>(blocks);
    if constexpr (KQuant<Type>) {
        return bytes;
    } else {
        return Type::signed_bytes ? _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)) : bytes;
    }
}

// groups[j]: rows j, j + 4, j + 8, j + 12, so that interleaving the lanes of four groups puts rows in order.
template <typename Type, int i>
[[gnu::always_inline]] inline void pack_bytes(const void *const groups[4][4], uint8_t (*q)[strip_rows][4]) {
    const __m512i a = unsigned_bytes<Type, i>(groups[0]), b = unsigned_bytes<Type, i>(groups[1]);
    const __m512i c = unsigned_bytes<Type, i>(groups[2]), d = unsigned_bytes<Type, i>(groups[3]);
    const __m512i ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
    const __m512i cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
    _mm512_store_si512(q[0], _mm512_unpacklo_epi64(ab_low, cd_low));
    _mm512_store_si512(q[1], _mm512_unpackhi_epi64(ab_low, cd_low));
    _mm512_store_si512(q[2], _mm512_unpacklo_epi64(ab_high, cd_high));
    _mm512_store_si512(q[3], _mm512_unpackhi_epi64(ab_high, cd_high));
    if constexpr (16 * (i + 1) < elements_of<Type>)
        pack_bytes<Type, i + 1>(groups, q + 4);
}

// Scales of rows 4 g .. 4 g + 3 of one block, into columns 4 g .. of `scale` and `low` [sub-block][row].
template <typename Type>
inline void pack_scales(const void *const blocks[4], float (*scale)[strip_rows], float (*low)[strip_rows]) {
    if constexpr (KQuant<Type>) {
        SubScales factors;
        Type::scales(blocks, &factors);
        for (int64_t s = 0; s < PI_QK_K / Type::sub_elements; ++s) {
            rows_store(scale[s], rows_load(factors.scale[s]));
            if constexpr (Type::zero == 0)
                rows_store(low[s], rows_mul(rows_load(factors.low[s]), rows_set(-1)));
        }
    } else if constexpr (Type::shifted) {
        vrows d, shift;
        Type::scales(blocks, &d, &shift);
        rows_store(scale[0], d);
        rows_store(low[0], shift);
    } else {
        vrows d;
        Type::scales(blocks, &d);
        rows_store(scale[0], d);
    }
}

// rows [16]: where the first of n blocks of every row is
template <typename Type>
void pack_strip(const char *const rows[strip_rows], int64_t n_blocks, Strip *strip) {
    constexpr int64_t subs = elements_of<Type> / sub_elements_of<Type>;
    for (int64_t b = 0; b < n_blocks; ++b) {
        const int64_t offset = b * Type::block_bytes;
        const void *groups[4][4], *neighbours[4][4];
        for (int64_t r = 0; r < strip_rows; ++r) {
            groups[r % 4][r / 4] = rows[r] + offset;
            neighbours[r / 4][r % 4] = rows[r] + offset;
        }
        pack_bytes<Type, 0>(groups, strip->q + b * elements_of<Type> / 4);
        for (int64_t g = 0; g < 4; ++g) {
            pack_scales<Type>(neighbours[g],
                              reinterpret_cast<float (*)[strip_rows]>(&strip->scale[b * subs][4 * g]),
                              reinterpret_cast<float (*)[strip_rows]>(&strip->low[b * subs][4 * g]));
        }
    }
}

// acc[t][v] = integer products of sub-block `sub`
template <int64_t sub_elements, int64_t n>
[[gnu::always_inline]] inline void multiply_sub_block(const Strip strips[n_strips], const TokenSlice &x,
                                                      int64_t sub, __m512i acc[n][n_strips]) {
    for (int64_t t = 0; t < n; ++t) {
        for (int64_t v = 0; v < n_strips; ++v)
            acc[t][v] = _mm512_setzero_si512();
    }
    const int8_t *q = x.q + sub * sub_elements;
    for (int64_t k = 0; k < sub_elements / 4; ++k) {
        const int64_t at = sub * (sub_elements / 4) + k;
        const __m512i w[n_strips] = {_mm512_load_si512(strips[0].q[at]), _mm512_load_si512(strips[1].q[at])};
        for (int64_t t = 0; t < n; ++t) {
            int32_t four;
            __builtin_memcpy(&four, q + t * x.q_stride + 4 * k, sizeof four);
            for (int64_t v = 0; v < n_strips; ++v)
                acc[t][v] = _mm512_dpbusd_epi32(acc[t][v], w[v], _mm512_set1_epi32(four));
        }
    }
}

// out[t * out_stride + row] of 32 rows, of which `kept` are stored: set where `first`, else added to. Not
// inlined: within its caller GCC has too few registers for the sums.
template <typename Type, int64_t n>
[[gnu::noinline]] void multiply_tile(const Strip strips[n_strips], const TokenSlice &x, int64_t n_columns,
                                     bool first, const __mmask16 kept[n_strips], float *out,
                                     int64_t out_stride) {
    constexpr int64_t sub_elements = sub_elements_of<Type>;
    constexpr int zero = zero_of<Type>();
    vfloat sums[n][n_strips];
    for (int64_t t = 0; t < n; ++t) {
        for (int64_t v = 0; v < n_strips; ++v) {
            sums[t][v] =
                first ? vzero() : _mm512_maskz_loadu_ps(kept[v], out + t * out_stride + v * strip_rows);
        }
    }
    for (int64_t sub = 0; sub < n_columns / sub_elements; ++sub) {
        __m512i acc[n][n_strips];
        multiply_sub_block<sub_elements, n>(strips, x, sub, acc);
        for (int64_t t = 0; t < n; ++t) {
            const vfloat d = vset(x.d[t * x.d_stride + sub * sub_elements / PI_QK]);
            const vfloat s = vset(x.s[t * x.s_stride + sub]);
            for (int64_t v = 0; v < n_strips; ++v) {
                const vfloat dots = _mm512_cvtepi32_ps(acc[t][v]), scale = vload(strips[v].scale[sub]);
                if constexpr (zero == 0) {
                    sums[t][v] = vfma(scale, vmul(d, dots), sums[t][v]);
                    sums[t][v] = vfma(vload(strips[v].low[sub]), s, sums[t][v]);
                } else {
                    sums[t][v] = vfma(scale, vfma(d, dots, vmul(s, vset(-zero))), sums[t][v]);
                }
            }
        }
    }
    for (int64_t t = 0; t < n; ++t) {
        for (int64_t v = 0; v < n_strips; ++v)
            _mm512_mask_storeu_ps(out + t * out_stride + v * strip_rows, kept[v], sums[t][v]);
    }
}

// n <= most
template <typename Type, int64_t most>
void multiply_rest(const Strip strips[n_strips], const TokenSlice &x, int64_t n, int64_t n_columns,
                   bool first, const __mmask16 kept[n_strips], float *out, int64_t out_stride) {
    if (n == most) {
        multiply_tile<Type, most>(strips, x, n_columns, first, kept, out, out_stride);
    } else if constexpr (most > 1) {
        multiply_rest<Type, most - 1>(strips, x, n, n_columns, first, kept, out, out_stride);
    }
}

template <typename Type>
void many_q8(const pi_rows *w, const pi_q8_vector *x, int64_t n_tokens, float *out, int64_t out_stride) {
    Strip strips[n_strips];
    for (int64_t row = 0; row < w->n_rows; row += n_strips * strip_rows) {
        const int64_t left = w->n_rows - row;
        const __mmask16 kept[n_strips] = {first_lanes(left < strip_rows ? left : strip_rows),
                                          first_lanes(left < strip_rows       ? 0
                                                      : left < 2 * strip_rows ? left - strip_rows
                                                                              : strip_rows)};
        for (int64_t column = 0; column < w->n_cols; column += strip_columns) {
            const int64_t rest = w->n_cols - column, n = rest < strip_columns ? rest : strip_columns;
            for (int64_t v = 0; v < n_strips; ++v) {
                const char *rows[strip_rows];
                for (int64_t r = 0; r < strip_rows; ++r) {
                    const int64_t i = row + v * strip_rows + r;
                    rows[r] = row_of(w, i < w->n_rows ? i : w->n_rows - 1) +
                              column / elements_of<Type> * Type::block_bytes;
                }
                pack_strip<Type>(rows, n / elements_of<Type>, &strips[v]);
            }
            float *to = out + row;
            for (int64_t token = 0; token < n_tokens; token += tile_tokens, to += tile_tokens * out_stride) {
                const TokenSlice slice = token_slice<Type>(x, w->n_cols, token, column);
                const int64_t n_each = n_tokens - token < tile_tokens ? n_tokens - token : tile_tokens;
                multiply_rest<Type, tile_tokens>(strips, slice, n_each, n, column == 0, kept, to, out_stride);
            }
        }
    }
}

} // namespace
