// avx512.inl: the vector vocabulary of simd/ in AVX-512 F, BW, DQ, VL and VNNI. Sixteen floats a vector.

#pragma once

namespace {

using vfloat = __m512;
using vmask = __mmask16;

constexpr int64_t lanes = 16;
constexpr int64_t block_vectors = PI_QK / lanes;
constexpr int64_t gemm_panel =
    32; // tokens; 12 x 2 sums, 2 vectors of tokens and a weight: 27 of 32 registers
constexpr int64_t gemm_rows = 12;
constexpr int64_t score_queries = 8;  // 8 x 2 sums
constexpr int64_t attend_queries = 4; // 4 x 4 sums

inline vfloat vzero() {
    return _mm512_setzero_ps();
}
inline vfloat vset(float x) {
    return _mm512_set1_ps(x);
}
inline vfloat vload(const float *p) {
    return _mm512_loadu_ps(p);
}
inline void vstore(float *p, vfloat x) {
    _mm512_storeu_ps(p, x);
}

inline vfloat vadd(vfloat a, vfloat b) {
    return _mm512_add_ps(a, b);
}
inline vfloat vsub(vfloat a, vfloat b) {
    return _mm512_sub_ps(a, b);
}
inline vfloat vmul(vfloat a, vfloat b) {
    return _mm512_mul_ps(a, b);
}
inline vfloat vdiv(vfloat a, vfloat b) {
    return _mm512_div_ps(a, b);
}
inline vfloat vmax(vfloat a, vfloat b) {
    return _mm512_max_ps(a, b);
}
inline vfloat vfma(vfloat a, vfloat b, vfloat c) {
    return _mm512_fmadd_ps(a, b, c);
}
inline vfloat vneg_abs(vfloat x) {
    return _mm512_or_ps(x, vset(-0.0f));
}
inline vfloat vround(vfloat x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// x * 2^n, n whole, both x and the result normal
inline vfloat vscale_power(vfloat x, vfloat n) {
    return _mm512_scalef_ps(x, n);
}

inline vmask first_lanes(int64_t n) {
    return static_cast<vmask>((1u << n) - 1);
}

inline vfloat vload_part(const float *p, int64_t n) {
    return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
inline void vstore_part(float *p, int64_t n, vfloat x) {
    _mm512_mask_storeu_ps(p, first_lanes(n), x);
}

inline vmask vgt(vfloat a, vfloat b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}
inline vmask vfirst(int64_t n, vmask mask) {
    return static_cast<vmask>(mask & first_lanes(n));
}
inline vfloat vkeep(vmask mask, vfloat x) {
    return _mm512_maskz_mov_ps(mask, x);
}
inline vfloat vdrop(vmask mask, vfloat x) {
    return _mm512_maskz_mov_ps(static_cast<vmask>(~mask), x);
}
inline vfloat vchoose(vmask mask, vfloat yes, vfloat no) {
    return _mm512_mask_blend_ps(mask, no, yes);
}
inline int vcount(vmask mask) {
    return __builtin_popcount(mask);
}

// Lane i by bit i.
inline vmask vbits(uint32_t bits) {
    return static_cast<vmask>(bits & 0xffffu);
}

inline float vfirst_lane(vfloat x) {
    return _mm512_cvtss_f32(x);
}
inline float vsum(vfloat x) {
    return _mm512_reduce_add_ps(x);
}
inline float vmax_lane(vfloat x) {
    return _mm512_reduce_max_ps(x);
}

// Sums in double: lanes 0-7 and 8-15.
struct vdouble {
    __m512d low, high;
};

inline vdouble vdouble_zero() {
    return {_mm512_setzero_pd(), _mm512_setzero_pd()};
}

inline vdouble vadd_squares(vfloat x, vdouble sums) {
    const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x));
    const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
    return {_mm512_fmadd_pd(low, low, sums.low), _mm512_fmadd_pd(high, high, sums.high)};
}

inline double vdouble_sum(vdouble sums) {
    return _mm512_reduce_add_pd(_mm512_add_pd(sums.low, sums.high));
}

// a0 a0 a1 a1 ... a7 a7 of p [8]
inline vfloat vtwice(const float *p) {
    const __m512i order = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(order, _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}

// Pairs (a, b) become (a c - b s, b c + a s).
inline vfloat vrotate(vfloat x, vfloat c, vfloat s) {
    return _mm512_fmaddsub_ps(x, c, vmul(_mm512_permute_ps(x, 0xb1), s));
}

inline __m256i load_32_bytes(const void *p) {
    return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}

inline vfloat vload_half(const pi_half *p) {
    return _mm512_cvtph_ps(load_32_bytes(p));
}

inline vfloat vload_bf16(const pi_bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32_bytes(p)), 16));
}

inline void vstore_half(pi_half *p, vfloat x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// A half in every lane.
inline vfloat vset_half(pi_half half) {
    return _mm512_cvtph_ps(_mm256_set1_epi16(static_cast<int16_t>(half)));
}

inline __m128i load_16_bytes(const void *p) {
    return _mm_loadu_si128(static_cast<const __m128i *>(p));
}

inline vfloat vload_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16_bytes(p)));
}

// table[q] of the 32 nibbles: the low ones of qs [16], then the high ones. A permute looks at four bits only.
inline void look_up_nibbles(const uint8_t *qs, vfloat table, vfloat out[block_vectors]) {
    const __m512i packed = _mm512_cvtepu8_epi32(load_16_bytes(qs));
    out[0] = _mm512_permutexvar_ps(packed, table);
    out[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(packed, 4), table);
}

inline vfloat sixteen_quants(float zero) {
    const vfloat q = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return vsub(q, vset(zero));
}

// d * (q - 8)
inline void unpack_nibbles_centred(const uint8_t *qs, vfloat d, vfloat out[block_vectors]) {
    look_up_nibbles(qs, vmul(d, sixteen_quants(8)), out);
}

// d * q + m; d * q is exact, so that fma and two operations agree.
inline void unpack_nibbles_affine(const uint8_t *qs, vfloat d, vfloat m, vfloat out[block_vectors]) {
    look_up_nibbles(qs, vfma(d, sixteen_quants(0), m), out);
}

// Largest |x| of a block by the integer order of the bits: NaN is above everything and is not lost.
inline float vlargest_magnitude(const vfloat x[block_vectors]) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i a = _mm512_and_si512(_mm512_castps_si512(x[0]), magnitude);
    const __m512i b = _mm512_and_si512(_mm512_castps_si512(x[1]), magnitude);
    const int32_t largest = _mm512_reduce_max_epi32(_mm512_max_epi32(a, b));
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(largest)));
}

// q [32] = x * factor rounded to the nearest even; sums [2] those of its halves.
inline void vstore_i8(const vfloat x[block_vectors], float factor, int8_t *q, int32_t sums[2]) {
    const __m512i a = _mm512_cvtps_epi32(vmul(x[0], vset(factor)));
    const __m512i b = _mm512_cvtps_epi32(vmul(x[1], vset(factor)));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(q), _mm512_cvtsepi32_epi8(a));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(q + lanes), _mm512_cvtsepi32_epi8(b));
    sums[0] = _mm512_reduce_add_epi32(a);
    sums[1] = _mm512_reduce_add_epi32(b);
}

// Rows a, b, c, d: four partial sums each.
using vdots = __m512;

// Sixteen bytes of each row.
using vbytes = __m512i;

inline vbytes load_bytes(const void *const rows[4], int64_t offset) {
    __m512i all = _mm512_castsi128_si512(load_16_bytes(static_cast<const char *>(rows[0]) + offset));
    all =
        _mm512_mask_broadcast_i32x4(all, 0x00f0, load_16_bytes(static_cast<const char *>(rows[1]) + offset));
    all =
        _mm512_mask_broadcast_i32x4(all, 0x0f00, load_16_bytes(static_cast<const char *>(rows[2]) + offset));
    return _mm512_mask_broadcast_i32x4(all, 0xf000,
                                       load_16_bytes(static_cast<const char *>(rows[3]) + offset));
}
inline vbytes bytes_and(vbytes a, uint8_t mask) {
    return _mm512_and_si512(a, _mm512_set1_epi8(static_cast<char>(mask)));
}
inline vbytes bytes_or(vbytes a, vbytes b) {
    return _mm512_or_si512(a, b);
}
template <int n> // of the bits of 16 bit words: a neighbour's bits come in
inline vbytes shift_right(vbytes a) {
    return _mm512_srli_epi16(a, n);
}
template <int n>
inline vbytes shift_left(vbytes a) {
    return _mm512_slli_epi16(a, n);
}

inline __m512i all_lanes(const void *p) {
    return _mm512_broadcast_i32x4(load_16_bytes(p));
}

inline vbytes look_up_bytes(const int8_t table[16], vbytes index) {
    return _mm512_shuffle_epi8(all_lanes(table), index);
}

// Byte j: `value` where bit j of the row's word [4 rows] (its low or its high half) is set, else 0.
template <int half>
inline vbytes bytes_of_bits(__m128i words, uint8_t value) {
    constexpr int64_t i = 0x0101010101010101 * (2 * half), j = 0x0101010101010101 * (2 * half + 1);
    constexpr int64_t row = 0x0404040404040404;
    const __m512i order =
        _mm512_setr_epi64(i, j, i + row, j + row, i + 2 * row, j + 2 * row, i + 3 * row, j + 3 * row);
    const __m512i spread = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(words), order);
    const __m512i bit = _mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201u));
    return _mm512_maskz_mov_epi8(_mm512_test_epi8_mask(spread, bit),
                                 _mm512_set1_epi8(static_cast<char>(value)));
}

inline vdots dot_unsigned(vbytes w, const int8_t *x) {
    return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), w, all_lanes(x)));
}

inline vdots dot_unsigned(vbytes w, vbytes v, const int8_t *x) {
    __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, all_lanes(x));
    sums = _mm512_dpbusd_epi32(sums, v, all_lanes(x + 16));
    return _mm512_cvtepi32_ps(sums);
}

// The sign of w moves over to x, so that |w| is the unsigned factor.
inline __m512i add_dot_signed(__m512i sums, __m512i w, __m512i x) {
    const __m512i signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    return _mm512_dpbusd_epi32(sums, _mm512_abs_epi8(w), signed_x);
}

inline vdots dot_signed(vbytes w, vbytes v, const int8_t *x) {
    const __m512i sums = add_dot_signed(_mm512_setzero_si512(), w, all_lanes(x));
    return _mm512_cvtepi32_ps(add_dot_signed(sums, v, all_lanes(x + 16)));
}

inline vdots zero_dots() {
    return vzero();
}

inline vdots add_scaled(vdots sums, __m128 scale, vdots dots) {
    const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return vfma(_mm512_permutexvar_ps(lane, _mm512_castps128_ps512(scale)), dots, sums);
}

inline __m128 sum_dots(vdots dots) {
    __m128 a = _mm512_castps512_ps128(dots), b = _mm512_extractf32x4_ps(dots, 1);
    __m128 c = _mm512_extractf32x4_ps(dots, 2), d = _mm512_extractf32x4_ps(dots, 3);
    return _mm_hadd_ps(_mm_hadd_ps(a, b), _mm_hadd_ps(c, d));
}

} // namespace

#include "x86_int8.inl"

#include "table.inl"

#include "avx512_many_q8.inl"

namespace {

constexpr pi_kernels make_avx512_table(const char *name, int (*usable)(void)) {
    return with_many_q8(make_table(name, usable));
}

} // namespace
