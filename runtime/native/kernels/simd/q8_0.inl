// q8_0.inl: value = d * q.

#pragma once

namespace {

struct Q8_0 {
    using Block = pi_block_q8_0;
    static constexpr bool any_length = false;
    static constexpr int64_t block_bytes = sizeof(Block);

    static void unpack(const void *block, vfloat out[block_vectors]) {
        const Block &w = *static_cast<const Block *>(block);
        const vfloat d = vset_half(w.d);
        for (int64_t j = 0; j < block_vectors; ++j)
            out[j] = vmul(d, vload_i8(w.qs + j * lanes));
    }

    // sum of d_w * q_w * d_x * q_x = d_w * d_x * (w . x)
    static constexpr bool shifted = false;
    static constexpr bool signed_bytes = true;
    template <int i> // elements 16 i .. 16 i + 15
    static vbytes bytes(const void *const blocks[4]) {
        return load_bytes(blocks, offsetof(Block, qs) + 16 * i);
    }
    static vdots dot(const void *const blocks[4], const int8_t *x) {
        return dot_signed(bytes<0>(blocks), bytes<1>(blocks), x);
    }
    static void scales(const void *const blocks[4], vrows *d) {
        *d = load_halves(blocks, offsetof(Block, d));
    }
};

} // namespace
