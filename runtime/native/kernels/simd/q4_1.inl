// q4_1.inl: value = d * q + m, q a nibble.

#pragma once

namespace {

struct Q4_1 {
    using Block = pi_block_q4_1;
    static constexpr bool any_length = false;
    static constexpr int64_t block_bytes = sizeof(Block);

    static void unpack(const void *block, vfloat out[block_vectors]) {
        const Block &w = *static_cast<const Block *>(block);
        unpack_nibbles_affine(w.qs, vset_half(w.d), vset_half(w.m), out);
    }

    // sum of (d_w * q_w + m_w) * d_x * q_x = d_w * d_x * (w . x) + m_w * s_x
    static constexpr bool shifted = true;
    static constexpr bool signed_bytes = false;
    static constexpr int zero = 0;
    template <int i> // elements 16 i .. 16 i + 15
    static vbytes bytes(const void *const blocks[4]) {
        const vbytes packed = load_bytes(blocks, offsetof(Block, qs));
        return i == 0 ? low_nibbles(packed) : high_nibbles(packed);
    }
    static vdots dot(const void *const blocks[4], const int8_t *x) {
        return dot_unsigned(bytes<0>(blocks), bytes<1>(blocks), x);
    }
    static void scales(const void *const blocks[4], vrows *d, vrows *shift) {
        load_two_halves(blocks, offsetof(Block, d), d, shift);
    }
};

} // namespace
