// q4_1.inl: value = d * q + m, q a nibble.

#pragma once

namespace {

struct Q4_1 {
    using Block = pi_block_q4_1;
    static constexpr bool any_length = false;
    static constexpr int64_t block_bytes = sizeof(Block);

    static void unpack(const void *block, vfloat out[block_vectors]) {
        const Block &w = *static_cast<const Block *>(block);
        unpack_nibbles_affine(w.qs, float_of_half(w.d), float_of_half(w.m), out);
    }

    // sum of (d_w * q_w + m_w) * d_x * q_x = d_w * d_x * (w . x) + m_w * s_x
    static constexpr bool shifted = true;
    static vsums dot(const void *block, vbytes x) {
        return dot_unsigned(load_nibbles(static_cast<const Block *>(block)->qs), x);
    }
    static void scales(const void *const blocks[4], vrows *d, vrows *shift) {
        load_half_pairs(blocks, d, shift);
    }
};

} // namespace
