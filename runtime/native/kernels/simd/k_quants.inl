// k_quants.inl: dot products of K-quant rows with int8 activations. A block of 256 has 8 or 16 sub-blocks,
// each with a small integer as its scale: sum of (scale * q - low) * d_x * q_x over a sub-block is scale *
// d_x * (q . q_x) - low * s_x, where s_x is the activations' own sum; low is a minimum, or the scale times
// the constant that makes q unsigned.

#pragma once

#include "rows.inl"

namespace {

// Of four rows: scale[s][r] and low[s][r] of sub-block s, in floats.
struct SubScales {
    float scale[16][4];
    float low[16][4];
};

// The lows of a type with minima are the minima, those of the others scales that still lack their constant.
template <typename Type>
constexpr float low_weight = Type::zero == 0 ? 1 : Type::zero;

// Elements 16 i .. 16 i + 15 of a block are sixteen bytes; members `bytes<i>` hand them out as
// 0..63, and `zero` is the one that stands for 0 (or 0 itself, where there are minima).
struct Q4_K {
    using Block = pi_block_q4_k;
    static constexpr int64_t block_bytes = sizeof(Block);
    static constexpr int64_t sub_elements = 32;
    static constexpr int zero = 0;

    template <int i>
    static vbytes bytes(const void *const blocks[4]) {
        const vbytes packed = load_bytes(blocks, offsetof(Block, qs) + 32 * (i / 4) + 16 * (i % 2));
        return i / 2 % 2 == 0 ? low_nibbles(packed) : high_nibbles(packed);
    }
    static void scales(const void *const blocks[4], SubScales *out) {
        unpack_six_bits(blocks, offsetof(Block, d), offsetof(Block, scales), out);
    }

    // 6 bit scales and minima in 12 bytes (see k_scale in unpack.inl), two factors before them.
    static void unpack_six_bits(const void *const blocks[4], int64_t factors, int64_t packed,
                                SubScales *out) {
        vrows d, dmin;
        load_two_halves(blocks, factors, &d, &dmin);
        const vwords a = load_words(blocks, packed), b = load_words(blocks, packed + 4);
        const vwords c = load_words(blocks, packed + 8);
        scale_bytes<false>(words_and(a, 63), d, out->scale);
        scale_bytes<false>(words_and(b, 63), dmin, out->low);
        const vwords top_a = words_and(words_right<2>(a), 48), top_b = words_and(words_right<2>(b), 48);
        scale_bytes<false>(words_or(words_and(c, 15), top_a), d, out->scale + 4);
        scale_bytes<false>(words_or(words_and(words_right<4>(c), 15), top_b), dmin, out->low + 4);
    }
};

struct Q5_K {
    using Block = pi_block_q5_k;
    static constexpr int64_t block_bytes = sizeof(Block);
    static constexpr int64_t sub_elements = 32;
    static constexpr int zero = 0;

    template <int i>
    static vbytes bytes(const void *const blocks[4]) {
        const vbytes packed = load_bytes(blocks, offsetof(Block, qs) + 32 * (i / 4) + 16 * (i % 2));
        const vbytes high = load_bytes(blocks, offsetof(Block, qh) + 16 * (i % 2));
        const vbytes nibbles = i / 2 % 2 == 0 ? low_nibbles(packed) : high_nibbles(packed);
        return bytes_or(nibbles, bytes_and(move_bits<4 - i / 2>(high), 16));
    }
    static void scales(const void *const blocks[4], SubScales *out) {
        Q4_K::unpack_six_bits(blocks, offsetof(Block, d), offsetof(Block, scales), out);
    }
};

struct Q6_K {
    using Block = pi_block_q6_k;
    static constexpr int64_t block_bytes = sizeof(Block);
    static constexpr int64_t sub_elements = 16;
    static constexpr int zero = 32;

    template <int i>
    static vbytes bytes(const void *const blocks[4]) {
        constexpr int half = i / 8, k = i / 2 % 4, begin = 16 * (i % 2);
        const vbytes packed = load_bytes(blocks, offsetof(Block, ql) + 64 * half + 32 * (k % 2) + begin);
        const vbytes high = load_bytes(blocks, offsetof(Block, qh) + 32 * half + begin);
        const vbytes nibbles = k < 2 ? low_nibbles(packed) : high_nibbles(packed);
        return bytes_or(nibbles, bytes_and(move_bits<4 - 2 * k>(high), 48));
    }
    static void scales(const void *const blocks[4], SubScales *out) {
        vrows before, d; // d ends the block: it is read together with the two bytes before it
        load_two_halves(blocks, offsetof(Block, d) - sizeof(pi_half), &before, &d);
        for (int64_t s = 0; s < 16; s += 4)
            scale_bytes<true>(load_words(blocks, offsetof(Block, scales) + s), d, out->scale + s);
    }
};

// Two bits of element 16 i + j: bits 2 k and 2 k + 1 of byte j, for Q2_K and Q3_K.
template <typename Block, int i>
inline vbytes two_bits(const void *const blocks[4]) {
    const vbytes packed = load_bytes(blocks, offsetof(Block, qs) + 32 * (i / 8) + 16 * (i % 2));
    return bytes_and(move_bits<-2 * (i / 2 % 4)>(packed), 3);
}

struct Q2_K {
    using Block = pi_block_q2_k;
    static constexpr int64_t block_bytes = sizeof(Block);
    static constexpr int64_t sub_elements = 16;
    static constexpr int zero = 0;

    template <int i>
    static vbytes bytes(const void *const blocks[4]) {
        return two_bits<Block, i>(blocks);
    }
    static void scales(const void *const blocks[4], SubScales *out) {
        vrows d, dmin;
        load_two_halves(blocks, offsetof(Block, d), &d, &dmin);
        for (int64_t s = 0; s < 16; s += 4) {
            const vwords packed = load_words(blocks, offsetof(Block, scales) + s);
            scale_bytes<false>(words_and(packed, 15), d, out->scale + s);
            scale_bytes<false>(words_and(words_right<4>(packed), 15), dmin, out->low + s);
        }
    }
};

struct Q3_K {
    using Block = pi_block_q3_k;
    static constexpr int64_t block_bytes = sizeof(Block);
    static constexpr int64_t sub_elements = 16;
    static constexpr int zero = 4;

    template <int i>
    static vbytes bytes(const void *const blocks[4]) {
        const vbytes high = load_bytes(blocks, offsetof(Block, hmask) + 16 * (i % 2));
        return bytes_or(two_bits<Block, i>(blocks), bytes_and(move_bits<2 - i / 2>(high), 4));
    }
    static void scales(const void *const blocks[4], SubScales *out) {
        vrows before, d;
        load_two_halves(blocks, offsetof(Block, d) - sizeof(pi_half), &before, &d);
        const int64_t at = offsetof(Block, scales);
        const vwords a = load_words(blocks, at), b = load_words(blocks, at + 4);
        const vwords top = load_words(blocks, at + 8);
        put(words_and(a, 15), words_left<4>(words_and(top, 3)), d, out->scale);
        put(words_and(b, 15), words_left<2>(words_and(top, 12)), d, out->scale + 4);
        put(words_and(words_right<4>(a), 15), words_and(top, 48), d, out->scale + 8);
        put(words_and(words_right<4>(b), 15), words_and(words_right<2>(top), 48), d, out->scale + 12);
    }

  private:
    static void put(vwords low, vwords high, vrows d, float (*out)[4]) {
        scale_bytes<true>(words_sub(words_or(low, high), 32), d, out);
    }
};

// Adds elements 32 i and on of the blocks; b is their int8 block.
template <typename Type, int i>
[[gnu::always_inline]] inline void dot_sub_blocks(const void *const blocks[4], const SubScales &f,
                                                  const pi_q8_vector *x, int64_t b, vdots *sums,
                                                  vrows *lows) {
    const vbytes first = Type::template bytes<2 * i>(blocks),
                 second = Type::template bytes<2 * i + 1>(blocks);
    const int8_t *q = x->q + b * PI_QK;
    const vrows d = rows_set(x->d[b]);
    if constexpr (Type::sub_elements == PI_QK) {
        *sums = add_scaled(*sums, rows_mul(rows_load(f.scale[i]), d), dot_unsigned(first, second, q));
        *lows = rows_fma(rows_load(f.low[i]), rows_set(x->s[b]), *lows);
    } else {
        const float (*low)[4] = Type::zero == 0 ? f.low : f.scale;
        *sums = add_scaled(*sums, rows_mul(rows_load(f.scale[2 * i]), d), dot_unsigned(first, q));
        *sums = add_scaled(*sums, rows_mul(rows_load(f.scale[2 * i + 1]), d), dot_unsigned(second, q + 16));
        *lows = rows_fma(rows_load(low[2 * i]), rows_set(x->h[2 * b]), *lows);
        *lows = rows_fma(rows_load(low[2 * i + 1]), rows_set(x->h[2 * b + 1]), *lows);
    }
    if constexpr (i + 1 < PI_QK_K / PI_QK)
        dot_sub_blocks<Type, i + 1>(blocks, f, x, b + 1, sums, lows);
}

template <typename Type>
inline void dot_k_group(const char *const *rows, Lookahead ahead, const pi_q8_vector *x, int64_t n_blocks,
                        float out[group_rows]) {
    const void *blocks[group_rows] = {rows[0], rows[1], rows[2], rows[3]};
    vdots sums = zero_dots();
    vrows lows = rows_zero();
    SubScales factors;
    for_each_block<Type>(rows, n_blocks, ahead, [&](int64_t block) {
        Type::scales(blocks, &factors);
        vdots block_sums = sums; // in registers: the captured ones are in memory
        vrows block_lows = lows;
        dot_sub_blocks<Type, 0>(blocks, factors, x, block * (PI_QK_K / PI_QK), &block_sums, &block_lows);
        sums = block_sums;
        lows = block_lows;
        for (int64_t r = 0; r < group_rows; ++r)
            blocks[r] = static_cast<const char *>(blocks[r]) + Type::block_bytes;
    });
    rows_store(out, rows_fma(lows, rows_set(-low_weight<Type>), sum_dots(sums)));
}

template <typename Type>
void dot_q8_k(const pi_rows *w, const pi_q8_vector *x, float *out) {
    for_each_group<Type>(w, PI_QK_K, out, [&](const char *const *rows, Lookahead ahead, float *sums) {
        dot_k_group<Type>(rows, ahead, x, w->n_cols / PI_QK_K, sums);
    });
}

} // namespace
