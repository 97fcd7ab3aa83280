// neon_int8.inl: int8 products in NEON, four rows that go together, with a vector each. The including file
// has defined add_products(sums, w, x): sums [4] int32 plus the products of sixteen signed bytes, four in
// each lane, no matter which; x is above -128. Integer sums are exact: any way to form them gives the same
// bits.

#pragma once

namespace {

using vrows = float32x4_t; // [4] one float for each row

inline vrows rows_zero() {
    return vzero();
}
inline vrows rows_set(float x) {
    return vset(x);
}
inline vrows rows_setr(float a, float b, float c, float d) {
    const float rows[4] = {a, b, c, d};
    return vload(rows);
}
inline vrows rows_load(const float *p) {
    return vload(p);
}
inline vrows rows_add(vrows a, vrows b) {
    return vadd(a, b);
}
inline vrows rows_mul(vrows a, vrows b) {
    return vmul(a, b);
}
inline vrows rows_fma(vrows a, vrows b, vrows c) {
    return vfma(a, b, c);
}
inline void rows_store(float *p, vrows a) {
    vstore(p, a);
}

// Sixteen bytes of each row.
struct vbytes {
    uint8x16_t row[4];
};

template <typename Function>
inline vbytes each_row(Function f) {
    return {f(0), f(1), f(2), f(3)};
}

inline vbytes load_bytes(const void *const rows[4], int64_t offset) {
    return each_row([&](int r) { return vld1q_u8(static_cast<const uint8_t *>(rows[r]) + offset); });
}
inline vbytes bytes_and(vbytes a, uint8_t mask) {
    return each_row([&](int r) { return vandq_u8(a.row[r], vdupq_n_u8(mask)); });
}
inline vbytes bytes_or(vbytes a, vbytes b) {
    return each_row([&](int r) { return vorrq_u8(a.row[r], b.row[r]); });
}
inline vbytes low_nibbles(vbytes packed) {
    return bytes_and(packed, 15);
}
inline vbytes high_nibbles(vbytes packed) {
    return each_row([&](int r) { return vshrq_n_u8(packed.row[r], 4); });
}

// Every bit of a byte n places up (down where n is negative).
template <int n>
inline vbytes move_bits(vbytes a) {
    if constexpr (n >= 0) {
        return each_row([&](int r) { return vshlq_n_u8(a.row[r], n); });
    } else {
        return each_row([&](int r) { return vshrq_n_u8(a.row[r], -n); });
    }
}

inline vbytes look_up_bytes(const int8_t table[16], vbytes index) {
    const uint8x16_t t = vreinterpretq_u8_s8(vld1q_s8(table));
    return each_row([&](int r) { return vqtbl1q_u8(t, index.row[r]); });
}

// Four bytes of each row.
using vwords = uint8x16_t;

inline vwords load_words(const void *const rows[4], int64_t offset) {
    uint32_t words[4];
    for (int r = 0; r < 4; ++r)
        words[r] = load_4_bytes(static_cast<const char *>(rows[r]) + offset);
    return vreinterpretq_u8_u32(vld1q_u32(words));
}
inline vwords words_and(vwords a, uint8_t mask) {
    return vandq_u8(a, vdupq_n_u8(mask));
}
inline vwords words_or(vwords a, vwords b) {
    return vorrq_u8(a, b);
}
inline vwords words_sub(vwords a, uint8_t b) { // byte by byte
    return vsubq_u8(a, vdupq_n_u8(b));
}
template <int n> // of the bits of a byte
inline vwords words_right(vwords a) {
    return vshrq_n_u8(a, n);
}
template <int n>
inline vwords words_left(vwords a) {
    return vshlq_n_u8(a, n);
}

// Byte j: `value` where bit j of the row's word (its low or its high half) is set, else 0.
template <int half>
inline vbytes bytes_of_bits(vwords words, uint8_t value) {
    constexpr uint8_t bits[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t bit = vcombine_u8(vld1_u8(bits), vld1_u8(bits));
    return each_row([&](int r) {
        const auto first = static_cast<uint8_t>(4 * r + 2 * half), second = static_cast<uint8_t>(first + 1);
        const uint8x16_t spread = vqtbl1q_u8(words, vcombine_u8(vdup_n_u8(first), vdup_n_u8(second)));
        return vandq_u8(vtstq_u8(spread, bit), vdupq_n_u8(value));
    });
}

// out[k][r] = factor[r] * byte k of row r; unsigned ones are at most 63
template <bool>
inline void scale_bytes(vwords words, vrows factor, float (*out)[4]) {
    constexpr uint8_t order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const uint8x16_t transposed = vqtbl1q_u8(words, vld1q_u8(order));
    vfloat values[4];
    float_of_bytes(vreinterpretq_s8_u8(transposed), values);
    for (int k = 0; k < 4; ++k)
        vstore(out[k], vmul(factor, values[k]));
}

inline vrows load_halves(const void *const rows[4], int64_t offset) {
    pi_half halves[4];
    for (int r = 0; r < 4; ++r)
        __builtin_memcpy(&halves[r], static_cast<const char *>(rows[r]) + offset, sizeof(pi_half));
    return vload_half(halves);
}

// Two halves at `offset` of every row: the first ones [4], the second ones [4].
inline void load_two_halves(const void *const rows[4], int64_t offset, vrows *first, vrows *second) {
    const uint32x4_t pairs = vreinterpretq_u32_u8(load_words(rows, offset));
    *first = float_of_halves(vmovn_u32(pairs));
    *second = float_of_halves(vshrn_n_u32(pairs, 16));
}

using vdots = vrows; // [4] the sum of each row's products

// [r] = w[r] . x[0, 16) + v[r] . x[16, 32)
inline vdots dot_signed(vbytes w, vbytes v, const int8_t *x) {
    const int8x16_t first = vld1q_s8(x), second = vld1q_s8(x + 16);
    const auto row = [&](int r) {
        const int32x4_t sums = add_products(vdupq_n_s32(0), vreinterpretq_s8_u8(w.row[r]), first);
        return add_products(sums, vreinterpretq_s8_u8(v.row[r]), second);
    };
    return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(row(0), row(1)), vpaddq_s32(row(2), row(3))));
}

// Bytes of at most 63 are signed ones too.
inline vdots dot_unsigned(vbytes w, vbytes v, const int8_t *x) {
    return dot_signed(w, v, x);
}

inline vdots dot_unsigned(vbytes w, const int8_t *x) {
    const int8x16_t first = vld1q_s8(x);
    const auto row = [&](int r) {
        return add_products(vdupq_n_s32(0), vreinterpretq_s8_u8(w.row[r]), first);
    };
    return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(row(0), row(1)), vpaddq_s32(row(2), row(3))));
}

inline vdots zero_dots() {
    return rows_zero();
}
inline vdots add_scaled(vdots sums, vrows scale, vdots dots) {
    return vfma(scale, dots, sums);
}
inline vrows sum_dots(vdots dots) {
    return dots;
}

} // namespace
