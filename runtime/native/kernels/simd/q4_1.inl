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
    static vdots dot(const void *const blocks[4], const int8_t *x) {
        const vbytes packed = load_bytes(blocks, offsetof(Block, qs));
        return dot_unsigned(low_nibbles(packed), high_nibbles(packed), x);
    }
    static void scales(const void *const blocks[4], vrows *d, vrows *shift) {
        load_two_halves(blocks, offsetof(Block, d), d, shift);
    }
};

} // namespace
