// avx2.cpp: the vector vocabulary of simd/ in AVX2, FMA and F16C. Eight floats a vector.
#include "cpu.h"
#include "kernels.h"

#include <immintrin.h>
#include <math.h>
#include <stddef.h>

namespace {

using vfloat = __m256;
using vmask = __m256; // all bits of a lane, or none

constexpr int64_t lanes = 8;
constexpr int64_t block_vectors = PI_QK / lanes;
constexpr int64_t gemm_panel = 16; // tokens; 6 x 2 sums, 2 vectors of tokens and a weight: 15 of 16 registers
constexpr int64_t gemm_rows = 6;
constexpr int64_t score_queries = 3;  // 3 x 4 sums
constexpr int64_t attend_queries = 3; // 3 x 4 sums

inline vfloat vzero() {
    return _mm256_setzero_ps();
}
inline vfloat vset(float x) {
    return _mm256_set1_ps(x);
}
inline vfloat vload(const float *p) {
    return _mm256_loadu_ps(p);
}
inline void vstore(float *p, vfloat x) {
    _mm256_storeu_ps(p, x);
}

inline vfloat vadd(vfloat a, vfloat b) {
    return _mm256_add_ps(a, b);
}
inline vfloat vsub(vfloat a, vfloat b) {
    return _mm256_sub_ps(a, b);
}
inline vfloat vmul(vfloat a, vfloat b) {
    return _mm256_mul_ps(a, b);
}
inline vfloat vdiv(vfloat a, vfloat b) {
    return _mm256_div_ps(a, b);
}
inline vfloat vmax(vfloat a, vfloat b) {
    return _mm256_max_ps(a, b);
}
inline vfloat vfma(vfloat a, vfloat b, vfloat c) {
    return _mm256_fmadd_ps(a, b, c);
}
inline vfloat vneg_abs(vfloat x) {
    return _mm256_or_ps(x, vset(-0.0f));
}
inline vfloat vround(vfloat x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// x * 2^n, n whole, both x and the result normal
inline vfloat vscale_power(vfloat x, vfloat n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return vmul(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

// The first n lanes.
inline __m256i first_lanes(int64_t n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lane);
}

inline vfloat vload_part(const float *p, int64_t n) {
    return _mm256_maskload_ps(p, first_lanes(n));
}
inline void vstore_part(float *p, int64_t n, vfloat x) {
    _mm256_maskstore_ps(p, first_lanes(n), x);
}

inline vmask vgt(vfloat a, vfloat b) {
    return _mm256_cmp_ps(a, b, _CMP_GT_OQ);
}
inline vmask vfirst(int64_t n, vmask mask) {
    return _mm256_and_ps(mask, _mm256_castsi256_ps(first_lanes(n)));
}
inline vfloat vkeep(vmask mask, vfloat x) {
    return _mm256_and_ps(mask, x);
}
inline vfloat vdrop(vmask mask, vfloat x) {
    return _mm256_andnot_ps(mask, x);
}
inline vfloat vchoose(vmask mask, vfloat yes, vfloat no) {
    return _mm256_blendv_ps(no, yes, mask);
}
inline int vcount(vmask mask) {
    return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(mask)));
}

// Lane i by bit i.
inline vmask vbits(uint32_t bits) {
    const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane_bit);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane_bit));
}

inline float vfirst_lane(vfloat x) {
    return _mm256_cvtss_f32(x);
}

inline float vsum(vfloat x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float vmax_lane(vfloat x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// Sums in double: lanes 0-3 and 4-7.
struct vdouble {
    __m256d low, high;
};

inline vdouble vdouble_zero() {
    return {_mm256_setzero_pd(), _mm256_setzero_pd()};
}

inline vdouble vadd_squares(vfloat x, vdouble sums) {
    const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
    const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    return {_mm256_fmadd_pd(low, low, sums.low), _mm256_fmadd_pd(high, high, sums.high)};
}

inline double vdouble_sum(vdouble sums) {
    const __m256d four = _mm256_add_pd(sums.low, sums.high);
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

// a0 a0 a1 a1 a2 a2 a3 a3 of p [4]
inline vfloat vtwice(const float *p) {
    const __m256 four = _mm256_castps128_ps256(_mm_loadu_ps(p));
    return _mm256_permutevar8x32_ps(four, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}

// Pairs (a, b) become (a c - b s, b c + a s).
inline vfloat vrotate(vfloat x, vfloat c, vfloat s) {
    return _mm256_fmaddsub_ps(x, c, vmul(_mm256_permute_ps(x, 0xb1), s));
}

inline __m128i load_16_bytes(const void *p) {
    return _mm_loadu_si128(static_cast<const __m128i *>(p));
}

inline vfloat vload_half(const pi_half *p) {
    return _mm256_cvtph_ps(load_16_bytes(p));
}

inline vfloat vload_bf16(const pi_bf16 *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16_bytes(p)), 16));
}

inline void vstore_half(pi_half *p, vfloat x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// A half in every lane.
inline vfloat vset_half(pi_half half) {
    return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(half)));
}

inline __m128i load_8_bytes(const void *p) {
    return _mm_loadl_epi64(static_cast<const __m128i *>(p));
}

inline vfloat vload_i8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8_bytes(p)));
}

// q - zero of the 32 nibbles: the low ones of qs [16], then the high ones.
inline void float_of_nibbles(const uint8_t *qs, int zero, vfloat q[block_vectors]) {
    for (int64_t j = 0; j < 2; ++j) {
        const __m256i packed = _mm256_cvtepu8_epi32(load_8_bytes(qs + j * lanes));
        const __m256i low = _mm256_and_si256(packed, _mm256_set1_epi32(15));
        const __m256i high = _mm256_srli_epi32(packed, 4);
        q[j] = _mm256_cvtepi32_ps(_mm256_sub_epi32(low, _mm256_set1_epi32(zero)));
        q[j + 2] = _mm256_cvtepi32_ps(_mm256_sub_epi32(high, _mm256_set1_epi32(zero)));
    }
}

// d * (q - 8)
inline void unpack_nibbles_centred(const uint8_t *qs, vfloat d, vfloat out[block_vectors]) {
    float_of_nibbles(qs, 8, out);
    for (int64_t j = 0; j < block_vectors; ++j)
        out[j] = vmul(d, out[j]);
}

// d * q + m; d * q is exact, so that fma and two operations agree.
inline void unpack_nibbles_affine(const uint8_t *qs, vfloat d, vfloat m, vfloat out[block_vectors]) {
    float_of_nibbles(qs, 0, out);
    for (int64_t j = 0; j < block_vectors; ++j)
        out[j] = vfma(d, out[j], m);
}

// Largest |x| of a block by the integer order of the bits: NaN is above everything and is not lost.
inline float vlargest_magnitude(const vfloat x[block_vectors]) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_setzero_si256();
    for (int64_t j = 0; j < block_vectors; ++j) {
        largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(x[j]), magnitude));
    }
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    four = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

// Of two vectors of eight int16 pairs that fit.
inline int32_t sum_i16(__m256i x) {
    const __m256i pairs = _mm256_madd_epi16(x, _mm256_set1_epi16(1));
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    four = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 1)));
}

// q [32] = x * factor rounded to the nearest even; sums [2] those of its halves.
inline void vstore_i8(const vfloat x[block_vectors], float factor, int8_t *q, int32_t sums[2]) {
    __m256i whole[block_vectors];
    for (int64_t j = 0; j < block_vectors; ++j)
        whole[j] = _mm256_cvtps_epi32(vmul(x[j], vset(factor)));
    const __m256i ab = _mm256_packs_epi32(whole[0], whole[1]);
    const __m256i cd = _mm256_packs_epi32(whole[2], whole[3]);
    const __m256i mixed = _mm256_packs_epi16(ab, cd); // a0 b0 c0 d0 a1 b1 c1 d1, four bytes each
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(q), _mm256_permutevar8x32_epi32(mixed, order));
    sums[0] = sum_i16(ab);
    sums[1] = sum_i16(cd);
}

// Rows a and b, rows c and d: four partial sums each.
struct vdots {
    __m256 ab, cd;
};

// Sixteen bytes of each row.
struct vbytes {
    __m256i ab, cd;
};

inline __m256i two_lanes(const void *low, const void *high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load_16_bytes(low)), load_16_bytes(high), 1);
}

inline __m256i both_lanes(const void *p) {
    return _mm256_broadcastsi128_si256(load_16_bytes(p));
}

inline vbytes load_bytes(const void *const rows[4], int64_t offset) {
    return {
        two_lanes(static_cast<const char *>(rows[0]) + offset, static_cast<const char *>(rows[1]) + offset),
        two_lanes(static_cast<const char *>(rows[2]) + offset, static_cast<const char *>(rows[3]) + offset)};
}
inline vbytes bytes_and(vbytes a, uint8_t mask) {
    const __m256i m = _mm256_set1_epi8(static_cast<char>(mask));
    return {_mm256_and_si256(a.ab, m), _mm256_and_si256(a.cd, m)};
}
inline vbytes bytes_or(vbytes a, vbytes b) {
    return {_mm256_or_si256(a.ab, b.ab), _mm256_or_si256(a.cd, b.cd)};
}
template <int n> // of the bits of 16 bit words: a neighbour's bits come in
inline vbytes shift_right(vbytes a) {
    return {_mm256_srli_epi16(a.ab, n), _mm256_srli_epi16(a.cd, n)};
}
template <int n>
inline vbytes shift_left(vbytes a) {
    return {_mm256_slli_epi16(a.ab, n), _mm256_slli_epi16(a.cd, n)};
}
inline vbytes look_up_bytes(const int8_t table[16], vbytes index) {
    const __m256i t = both_lanes(table);
    return {_mm256_shuffle_epi8(t, index.ab), _mm256_shuffle_epi8(t, index.cd)};
}

// Byte j: `value` where bit j of the row's word [4 rows] (its low or its high half) is set, else 0.
template <int half>
inline vbytes bytes_of_bits(__m128i words, uint8_t value) {
    constexpr char i = 2 * half, j = i + 1;
    const __m256i both = _mm256_broadcastsi128_si256(words);
    const __m256i to_ab =
        _mm256_setr_epi8(i, i, i, i, i, i, i, i, j, j, j, j, j, j, j, j, i + 4, i + 4, i + 4, i + 4, i + 4,
                         i + 4, i + 4, i + 4, j + 4, j + 4, j + 4, j + 4, j + 4, j + 4, j + 4, j + 4);
    const __m256i to_cd = _mm256_add_epi8(to_ab, _mm256_set1_epi8(8));
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
    const __m256i ab = _mm256_and_si256(_mm256_shuffle_epi8(both, to_ab), bit);
    const __m256i cd = _mm256_and_si256(_mm256_shuffle_epi8(both, to_cd), bit);
    return bytes_and({_mm256_cmpeq_epi8(ab, bit), _mm256_cmpeq_epi8(cd, bit)}, value);
}

// [8] int32
inline __m256i dot_unsigned_words(__m256i w, __m256i x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
}

inline vdots dot_unsigned(vbytes w, const int8_t *x) {
    const __m256i first = both_lanes(x);
    return {_mm256_cvtepi32_ps(dot_unsigned_words(w.ab, first)),
            _mm256_cvtepi32_ps(dot_unsigned_words(w.cd, first))};
}

// [8] int32: w at most 63 lets four products add up in int16.
inline __m256i dot_unsigned_pair(__m256i w, __m256i v, __m256i x, __m256i y) {
    const __m256i products = _mm256_add_epi16(_mm256_maddubs_epi16(w, x), _mm256_maddubs_epi16(v, y));
    return _mm256_madd_epi16(products, _mm256_set1_epi16(1));
}

inline vdots dot_unsigned(vbytes w, vbytes v, const int8_t *x) {
    const __m256i first = both_lanes(x), second = both_lanes(x + 16);
    return {_mm256_cvtepi32_ps(dot_unsigned_pair(w.ab, v.ab, first, second)),
            _mm256_cvtepi32_ps(dot_unsigned_pair(w.cd, v.cd, first, second))};
}

// [8] int32. The sign of w moves over to x, so that |w| is the unsigned factor; 128 * 127 * 2 fits int16.
inline __m256i dot_signed_words(__m256i w, __m256i x) {
    const __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(products, _mm256_set1_epi16(1));
}

inline vdots dot_signed(vbytes w, vbytes v, const int8_t *x) {
    const __m256i first = both_lanes(x), second = both_lanes(x + 16);
    const __m256i ab = _mm256_add_epi32(dot_signed_words(w.ab, first), dot_signed_words(v.ab, second));
    const __m256i cd = _mm256_add_epi32(dot_signed_words(w.cd, first), dot_signed_words(v.cd, second));
    return {_mm256_cvtepi32_ps(ab), _mm256_cvtepi32_ps(cd)};
}

inline vdots zero_dots() {
    return {vzero(), vzero()};
}

inline vdots add_scaled(vdots sums, __m128 scale, vdots dots) {
    const __m256 s = _mm256_castps128_ps256(scale);
    const __m256 ab = _mm256_permutevar8x32_ps(s, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
    const __m256 cd = _mm256_permutevar8x32_ps(s, _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3));
    return {vfma(ab, dots.ab, sums.ab), vfma(cd, dots.cd, sums.cd)};
}

inline __m128 sum_dots(vdots dots) {
    const __m256 pairs = _mm256_hadd_ps(dots.ab, dots.cd); // a a c c, b b d d
    const __m256 rows = _mm256_hadd_ps(pairs, pairs);      // a c a c, b d b d
    return _mm_unpacklo_ps(_mm256_castps256_ps128(rows), _mm256_extractf128_ps(rows, 1));
}

} // namespace

#include "simd/x86_int8.inl"

#include "simd/table.inl"

const pi_kernels pi_kernels_avx2 = make_table("avx2", pi_cpu_has_avx2);
