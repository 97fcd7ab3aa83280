// x86_int8.inl: what every x86 table needs of int8 products. Four rows go together, each in its own 128 bit
// lane; the including file defines, in registers of its width,
//   vdots                       [4 rows][4] float partial sums
//   dot_i8(qs, x)               qs [4] rows' 32 signed bytes, times x [32]
//   dot_nibbles(qs, x)          the same for 32 nibbles 0..15 in 16 bytes, the low ones first
//   add_scaled(sums, s, dots)   sums[r] + s[r] * dots[r]
//   sum_dots(dots)              [r] = the sum of dots[r]
// x is above -128.

#pragma once

namespace {

using vrows = __m128; // [4] one float for each row

inline vrows rows_zero() {
    return _mm_setzero_ps();
}
inline vrows rows_set(float x) {
    return _mm_set1_ps(x);
}
inline vrows rows_add(vrows a, vrows b) {
    return _mm_add_ps(a, b);
}
inline vrows rows_mul(vrows a, vrows b) {
    return _mm_mul_ps(a, b);
}
inline vrows rows_fma(vrows a, vrows b, vrows c) {
    return _mm_fmadd_ps(a, b, c);
}
inline void rows_store(float *p, vrows a) {
    _mm_storeu_ps(p, a);
}

inline __m128i load_4_bytes(const void *p) {
    int32_t value;
    __builtin_memcpy(&value, p, sizeof value);
    return _mm_cvtsi32_si128(value);
}

// [8] halves: the first of every block, then the second of every block. No block is shorter than 4 bytes.
inline __m128i load_half_pairs(const void *const blocks[4]) {
    const __m128i ab = _mm_unpacklo_epi16(load_4_bytes(blocks[0]), load_4_bytes(blocks[1]));
    const __m128i cd = _mm_unpacklo_epi16(load_4_bytes(blocks[2]), load_4_bytes(blocks[3]));
    return _mm_unpacklo_epi32(ab, cd);
}

inline vrows load_halves(const void *const blocks[4]) {
    return _mm_cvtph_ps(load_half_pairs(blocks));
}

inline void load_two_halves(const void *const blocks[4], vrows *first, vrows *second) {
    __m256 both = _mm256_cvtph_ps(load_half_pairs(blocks));
    __asm__("" : "+x"(both)); // else GCC 12 converts the lower half a second time
    *first = _mm256_castps256_ps128(both);
    *second = _mm256_extractf128_ps(both, 1);
}

} // namespace
