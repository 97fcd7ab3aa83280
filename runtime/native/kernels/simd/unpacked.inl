// unpacked.inl: rows of types without vector code of their own: a block becomes floats (../unpack.inl), which
// are then multiplied as vectors. One row at a time.

#pragma once

#include "../unpack.inl"

namespace {

template <typename Block>
const Block *blocks_of(const pi_rows *w, int64_t i) {
    return static_cast<const Block *>(static_cast<const void *>(row_of(w, i)));
}

template <typename Block>
void unpacked_dequantize(const void *row, int64_t begin, int64_t n, float *out) {
    constexpr int64_t size = block_elements<Block>;
    const Block *block = static_cast<const Block *>(row) + begin / size;
    for (; n >= size; n -= size, out += size)
        unpack(*block++, out);
    if (n <= 0)
        return;
    float values[size];
    unpack(*block, values);
    for (int64_t i = 0; i < n; ++i)
        out[i] = values[i];
}

template <typename Block>
void unpacked_dot(const pi_rows *w, const float *x, float *out) {
    constexpr int64_t size = block_elements<Block>;
    float values[size];
    for (int64_t i = 0; i < w->n_rows; ++i) {
        const Block *blocks = blocks_of<Block>(w, i);
        vfloat sums[2] = {vzero(), vzero()};
        for (int64_t begin = 0; begin < w->n_cols; begin += size) {
            unpack(*blocks++, values);
            for (int64_t j = 0; j < size; j += 2 * lanes) {
                sums[0] = vfma(vload(values + j), vload(x + begin + j), sums[0]);
                sums[1] = vfma(vload(values + j + lanes), vload(x + begin + j + lanes), sums[1]);
            }
        }
        out[i] = vsum(vadd(sums[0], sums[1]));
    }
}

// n is a multiple of the block: a quantised row has no other ends.
template <typename Block>
void unpacked_axpy(const pi_rows *w, const float *coef, int64_t begin, int64_t n, float *y) {
    constexpr int64_t size = block_elements<Block>;
    float values[size];
    for (int64_t i = 0; i < w->n_rows; ++i) {
        if (coef[i] == 0)
            continue;
        const Block *blocks = blocks_of<Block>(w, i) + begin / size;
        const vfloat c = vset(coef[i]);
        for (int64_t at = 0; at < n; at += size) {
            unpack(*blocks++, values);
            for (int64_t j = 0; j < size; j += lanes)
                vstore(y + at + j, vfma(c, vload(values + j), vload(y + at + j)));
        }
    }
}

template <typename Block>
constexpr pi_type_kernels unpacked_type(void (*dot_q8)(const pi_rows *, const pi_q8_vector *, float *)) {
    return {unpacked_dequantize<Block>, unpacked_dot<Block>, dot_q8, nullptr, unpacked_axpy<Block>};
}

} // namespace
