// q8_0.inl: value = d * q.

#pragma once

namespace {

struct Q8_0 {
    using Block = pi_block_q8_0;
    static constexpr bool any_length = false;
    static constexpr int64_t block_bytes = sizeof(Block);

    static const int8_t *quants(const void *block) { return static_cast<const Block *>(block)->qs; }

    static void unpack(const void *block, vfloat out[block_vectors]) {
        const Block &w = *static_cast<const Block *>(block);
        const vfloat d = vset_half(w.d);
        for (int64_t j = 0; j < block_vectors; ++j)
            out[j] = vmul(d, vload_i8(w.qs + j * lanes));
    }

    // sum of d_w * q_w * d_x * q_x = d_w * d_x * (w . x)
    static constexpr bool shifted = false;
    static vdots dot(const void *const blocks[4], const int8_t *x) {
        const int8_t *const qs[] = {quants(blocks[0]), quants(blocks[1]), quants(blocks[2]),
                                    quants(blocks[3])};
        return dot_i8(qs, x);
    }
    static void scales(const void *const blocks[4], vrows *d) { *d = load_halves(blocks); }
};

} // namespace
