// x86_int8.inl: what every x86 table needs of int8 products. Four rows go together, each in its own 128 bit
// lane; the including file defines, in registers of its width,
//   vbytes                      [4 rows][16] bytes: load_bytes(rows, offset), bytes_and, bytes_or,
//   shift_right
//                               and shift_left, look_up_bytes, bytes_of_bits
//   vdots                       [4 rows][4] float partial sums
//   dot_unsigned(w, x)          w 0..63 times x [16]; (w, v, x) two of them times x [32]
//   dot_signed(w, v, x)         signed bytes times x [32]
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
inline vrows rows_setr(float a, float b, float c, float d) {
    return _mm_setr_ps(a, b, c, d);
}
inline vrows rows_load(const float *p) {
    return _mm_loadu_ps(p);
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

inline vbytes low_nibbles(vbytes packed) {
    return bytes_and(packed, 15);
}
inline vbytes high_nibbles(vbytes packed) {
    return bytes_and(shift_right<4>(packed), 15);
}

// Every bit n places up (down where n is negative); what crosses from byte to byte is for the caller to mask.
template <int n>
inline vbytes move_bits(vbytes a) {
    if constexpr (n >= 0) {
        return shift_left<n>(a);
    } else {
        return shift_right<-n>(a);
    }
}

// Four bytes of each row.
using vwords = __m128i;

inline __m128i load_4_bytes(const void *p) {
    int32_t value;
    __builtin_memcpy(&value, p, sizeof value);
    return _mm_cvtsi32_si128(value);
}

inline vwords load_words(const void *const rows[4], int64_t offset) {
    const char *const p[] = {
        static_cast<const char *>(rows[0]) + offset, static_cast<const char *>(rows[1]) + offset,
        static_cast<const char *>(rows[2]) + offset, static_cast<const char *>(rows[3]) + offset};
    return _mm_unpacklo_epi64(_mm_unpacklo_epi32(load_4_bytes(p[0]), load_4_bytes(p[1])),
                              _mm_unpacklo_epi32(load_4_bytes(p[2]), load_4_bytes(p[3])));
}

inline vwords words_and(vwords a, uint8_t mask) {
    return _mm_and_si128(a, _mm_set1_epi8(static_cast<char>(mask)));
}
inline vwords words_or(vwords a, vwords b) {
    return _mm_or_si128(a, b);
}
inline vwords words_sub(vwords a, uint8_t b) { // byte by byte
    return _mm_sub_epi8(a, _mm_set1_epi8(static_cast<char>(b)));
}
template <int n>
inline vwords words_right(vwords a) {
    return _mm_srli_epi32(a, n);
}
template <int n>
inline vwords words_left(vwords a) {
    return _mm_slli_epi32(a, n);
}

// out[k][r] = factor[r] * byte k of row r
template <bool is_signed>
inline void scale_bytes(vwords words, vrows factor, float (*out)[4]) {
    const __m128i transposed =
        _mm_shuffle_epi8(words, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    const __m128i upper = _mm_unpackhi_epi64(transposed, transposed);
    const __m256i low = is_signed ? _mm256_cvtepi8_epi32(transposed) : _mm256_cvtepu8_epi32(transposed);
    const __m256i high = is_signed ? _mm256_cvtepi8_epi32(upper) : _mm256_cvtepu8_epi32(upper);
    const __m256 twice = _mm256_set_m128(factor, factor);
    _mm256_storeu_ps(out[0], _mm256_mul_ps(twice, _mm256_cvtepi32_ps(low)));
    _mm256_storeu_ps(out[2], _mm256_mul_ps(twice, _mm256_cvtepi32_ps(high)));
}

// Two halves in 4 bytes at `offset` of every row: the first ones [4], the second ones [4].
inline __m128i load_half_pairs(const void *const rows[4], int64_t offset) {
    const char *const p[] = {
        static_cast<const char *>(rows[0]) + offset, static_cast<const char *>(rows[1]) + offset,
        static_cast<const char *>(rows[2]) + offset, static_cast<const char *>(rows[3]) + offset};
    const __m128i ab = _mm_unpacklo_epi16(load_4_bytes(p[0]), load_4_bytes(p[1]));
    const __m128i cd = _mm_unpacklo_epi16(load_4_bytes(p[2]), load_4_bytes(p[3]));
    return _mm_unpacklo_epi32(ab, cd);
}

inline vrows load_halves(const void *const rows[4], int64_t offset) {
    return _mm_cvtph_ps(load_half_pairs(rows, offset));
}

inline void load_two_halves(const void *const rows[4], int64_t offset, vrows *first, vrows *second) {
    __m256 both = _mm256_cvtph_ps(load_half_pairs(rows, offset));
    __asm__("" : "+x"(both)); // else GCC 12 converts the lower half a second time
    *first = _mm256_castps256_ps128(both);
    *second = _mm256_extractf128_ps(both, 1);
}

} // namespace
