// x86_int8.inl: int8 blocks and their scales in 128 and 256 bit registers, for every x86 table. The including
// file defines dot_bytes(u, s): [8] int32 sums of four neighbouring products, u unsigned, s signed.

#pragma once

namespace {

using vbytes = __m256i; // a block's 32 bytes, in element order
using vsums = __m256;   // [8] float partial sums of one row
using vrows = __m128;   // [4] one float for each of four rows

inline vbytes load_bytes(const int8_t *q) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(q));
}

// 0..15: the low nibbles of qs [16], then the high ones.
inline vbytes load_nibbles(const uint8_t *qs) {
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i *>(qs));
    const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    const __m256i shifted = _mm256_srlv_epi32(_mm256_broadcastsi128_si256(packed), shifts);
    return _mm256_and_si256(shifted, _mm256_set1_epi8(15));
}

// u at most 128, s above -128
inline vsums dot_unsigned(vbytes u, vbytes s) {
    return _mm256_cvtepi32_ps(dot_bytes(u, s));
}

// s above -128: the sign of w moves over to s.
inline vsums dot_signed(vbytes w, vbytes s) {
    return dot_unsigned(_mm256_abs_epi8(w), _mm256_sign_epi8(s, w));
}

inline vsums zero_sums() {
    return _mm256_setzero_ps();
}

inline vrows rows_zero() {
    return _mm_setzero_ps();
}
inline vrows rows_set(float x) {
    return _mm_set1_ps(x);
}
inline vrows rows_mul(vrows a, vrows b) {
    return _mm_mul_ps(a, b);
}
inline vrows rows_fma(vrows a, vrows b, vrows c) {
    return _mm_fmadd_ps(a, b, c);
}
inline vrows rows_add(vrows a, vrows b) {
    return _mm_add_ps(a, b);
}
inline void rows_store(float *p, vrows a) {
    _mm_storeu_ps(p, a);
}

// sums[r] += scale[r] * dots[r]
inline void add_scaled(vsums sums[4], vrows scale, const vsums dots[4]) {
    const __m256 s = _mm256_broadcast_ps(&scale);
    sums[0] = _mm256_fmadd_ps(_mm256_permute_ps(s, 0x00), dots[0], sums[0]);
    sums[1] = _mm256_fmadd_ps(_mm256_permute_ps(s, 0x55), dots[1], sums[1]);
    sums[2] = _mm256_fmadd_ps(_mm256_permute_ps(s, 0xaa), dots[2], sums[2]);
    sums[3] = _mm256_fmadd_ps(_mm256_permute_ps(s, 0xff), dots[3], sums[3]);
}

// [r] = the sum of sums[r]
inline vrows reduce_rows(const vsums sums[4]) {
    const __m256 ab = _mm256_hadd_ps(sums[0], sums[1]);
    const __m256 cd = _mm256_hadd_ps(sums[2], sums[3]);
    const __m256 halves = _mm256_hadd_ps(ab, cd);
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

inline __m128i load_4_bytes(const void *p) {
    int32_t value;
    __builtin_memcpy(&value, p, sizeof value);
    return _mm_cvtsi32_si128(value);
}

// The half at the start of each of four blocks; a block is never shorter than the 4 bytes read.
inline vrows load_halves(const void *const blocks[4]) {
    const __m128i ab = _mm_unpacklo_epi16(load_4_bytes(blocks[0]), load_4_bytes(blocks[1]));
    const __m128i cd = _mm_unpacklo_epi16(load_4_bytes(blocks[2]), load_4_bytes(blocks[3]));
    return _mm_cvtph_ps(_mm_unpacklo_epi32(ab, cd));
}

// The two halves at the start of each of four blocks.
inline void load_half_pairs(const void *const blocks[4], vrows *first, vrows *second) {
    const __m128i ab = _mm_unpacklo_epi16(load_4_bytes(blocks[0]), load_4_bytes(blocks[1])); // a0 b0 a1 b1
    const __m128i cd = _mm_unpacklo_epi16(load_4_bytes(blocks[2]), load_4_bytes(blocks[3]));
    const __m256 both = _mm256_cvtph_ps(_mm_unpacklo_epi32(ab, cd)); // a0 b0 c0 d0, a1 b1 c1 d1
    *first = _mm256_castps256_ps128(both);
    *second = _mm256_extractf128_ps(both, 1);
}

} // namespace
