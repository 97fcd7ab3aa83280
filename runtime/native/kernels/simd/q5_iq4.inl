// q5_iq4.inl: dot products with int8 activations of the blocks of 32 that have no other vector code: Q5_0,
// Q5_1, IQ4_NL and MXFP4.

#pragma once

#include "../unpack.inl"
#include "dot_q8.inl"

namespace {

// Elements 16 i .. 16 i + 15: q of 5 bits, nibbles in `qs`, the fifth bits in `qh`.
template <typename Block, int i>
inline vbytes five_bits(const void *const blocks[4]) {
    const vbytes packed = load_bytes(blocks, offsetof(Block, qs));
    const vbytes high = bytes_of_bits<i>(load_words(blocks, offsetof(Block, qh)), 16);
    return bytes_or(i == 0 ? low_nibbles(packed) : high_nibbles(packed), high);
}

// value = d * (q - 16)
struct Q5_0 {
    using Block = pi_block_q5_0;
    static constexpr int64_t block_bytes = sizeof(Block);
    static constexpr bool shifted = true;
    static constexpr bool signed_bytes = false;
    static constexpr int zero = 16;
    template <int i>
    static vbytes bytes(const void *const blocks[4]) {
        return five_bits<Block, i>(blocks);
    }
    static vdots dot(const void *const blocks[4], const int8_t *x) {
        return dot_unsigned(bytes<0>(blocks), bytes<1>(blocks), x);
    }
    static void scales(const void *const blocks[4], vrows *d, vrows *shift) {
        *d = load_halves(blocks, offsetof(Block, d));
        *shift = rows_mul(*d, rows_set(-16));
    }
};

// value = d * q + m
struct Q5_1 {
    using Block = pi_block_q5_1;
    static constexpr int64_t block_bytes = sizeof(Block);
    static constexpr bool shifted = true;
    static constexpr bool signed_bytes = false;
    static constexpr int zero = 0;
    template <int i>
    static vbytes bytes(const void *const blocks[4]) {
        return five_bits<Block, i>(blocks);
    }
    static vdots dot(const void *const blocks[4], const int8_t *x) {
        return dot_unsigned(bytes<0>(blocks), bytes<1>(blocks), x);
    }
    static void scales(const void *const blocks[4], vrows *d, vrows *shift) {
        load_two_halves(blocks, offsetof(Block, d), d, shift);
    }
};

// Elements 16 i .. 16 i + 15: table[q] of the nibbles in `qs`.
template <typename Block, int i>
inline vbytes table_values(const void *const blocks[4], const int8_t table[16]) {
    const vbytes packed = load_bytes(blocks, offsetof(Block, qs));
    return look_up_bytes(table, i == 0 ? low_nibbles(packed) : high_nibbles(packed));
}

// value = d * table[q]
struct IQ4_NL {
    using Block = pi_block_iq4_nl;
    static constexpr int64_t block_bytes = sizeof(Block);
    static constexpr bool shifted = false;
    static constexpr int8_t table[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};
    static constexpr bool signed_bytes = true;
    template <int i>
    static vbytes bytes(const void *const blocks[4]) {
        return table_values<Block, i>(blocks, table);
    }
    static vdots dot(const void *const blocks[4], const int8_t *x) {
        return dot_signed(bytes<0>(blocks), bytes<1>(blocks), x);
    }
    static void scales(const void *const blocks[4], vrows *d) {
        *d = load_halves(blocks, offsetof(Block, d));
    }
};

// value = 2^(e - 128) * table[q], the table holding doubled E2M1
struct MXFP4 {
    using Block = pi_block_mxfp4;
    static constexpr int64_t block_bytes = sizeof(Block);
    static constexpr bool shifted = false;
    static constexpr int8_t table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static constexpr bool signed_bytes = true;
    template <int i>
    static vbytes bytes(const void *const blocks[4]) {
        return table_values<Block, i>(blocks, table);
    }
    static vdots dot(const void *const blocks[4], const int8_t *x) {
        return dot_signed(bytes<0>(blocks), bytes<1>(blocks), x);
    }
    static void scales(const void *const blocks[4], vrows *d) {
        float factors[4];
        for (int r = 0; r < 4; ++r)
            factors[r] = half_of_e8m0(static_cast<const Block *>(blocks[r])->e);
        *d = rows_setr(factors[0], factors[1], factors[2], factors[3]);
    }
};

} // namespace
