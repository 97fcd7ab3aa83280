// neon.inl: the vector vocabulary of simd/ in NEON, four floats a vector.

#pragma once

namespace {

using vfloat = float32x4_t;
using vmask = uint32x4_t; // all bits of a lane, or none

constexpr int64_t lanes = 4;
constexpr int64_t block_vectors = PI_QK / lanes;
constexpr int64_t gemm_panel = 16; // tokens; 6 x 4 sums, 4 vectors of tokens and a weight: 29 of 32 registers
constexpr int64_t gemm_rows = 6;
constexpr int64_t score_queries = 2;  // 2 x 8 sums and 8 vectors of keys
constexpr int64_t attend_queries = 3; // 3 x 4 sums of values

inline vfloat vzero() {
    return vdupq_n_f32(0);
}
inline vfloat vset(float x) {
    return vdupq_n_f32(x);
}
inline vfloat vload(const float *p) {
    return vld1q_f32(p);
}
inline void vstore(float *p, vfloat x) {
    vst1q_f32(p, x);
}

inline vfloat vadd(vfloat a, vfloat b) {
    return vaddq_f32(a, b);
}
inline vfloat vsub(vfloat a, vfloat b) {
    return vsubq_f32(a, b);
}
inline vfloat vmul(vfloat a, vfloat b) {
    return vmulq_f32(a, b);
}
inline vfloat vdiv(vfloat a, vfloat b) {
    return vdivq_f32(a, b);
}
inline vfloat vmax(vfloat a, vfloat b) {
    return vmaxq_f32(a, b);
}
inline vfloat vfma(vfloat a, vfloat b, vfloat c) {
    return vfmaq_f32(c, a, b);
}
inline vfloat vneg_abs(vfloat x) {
    return vnegq_f32(vabsq_f32(x));
}
inline vfloat vround(vfloat x) {
    return vrndnq_f32(x);
}

// x * 2^n, n whole, both x and the result normal
inline vfloat vscale_power(vfloat x, vfloat n) {
    const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return vmul(x, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}

// There are no masked loads: the first n < 4 lanes go through memory.
inline vfloat vload_part(const float *p, int64_t n) {
    float padded[lanes] = {};
    for (int64_t i = 0; i < n; ++i)
        padded[i] = p[i];
    return vload(padded);
}
inline void vstore_part(float *p, int64_t n, vfloat x) {
    float whole[lanes];
    vstore(whole, x);
    for (int64_t i = 0; i < n; ++i)
        p[i] = whole[i];
}

inline vmask vgt(vfloat a, vfloat b) {
    return vcgtq_f32(a, b);
}
inline vmask vfirst(int64_t n, vmask mask) {
    constexpr int32_t lane[lanes] = {0, 1, 2, 3};
    return vandq_u32(mask, vcgtq_s32(vdupq_n_s32(static_cast<int32_t>(n)), vld1q_s32(lane)));
}
inline vfloat vkeep(vmask mask, vfloat x) {
    return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(x)));
}
inline vfloat vdrop(vmask mask, vfloat x) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), mask));
}
inline vfloat vchoose(vmask mask, vfloat yes, vfloat no) {
    return vbslq_f32(mask, yes, no);
}
inline int vcount(vmask mask) {
    return -vaddvq_s32(vreinterpretq_s32_u32(mask));
}

// Lane i by bit i.
inline vmask vbits(uint32_t bits) {
    constexpr uint32_t lane_bit[lanes] = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32(bits), vld1q_u32(lane_bit));
}

inline float vfirst_lane(vfloat x) {
    return vgetq_lane_f32(x, 0);
}
inline float vsum(vfloat x) {
    return vaddvq_f32(x);
}
inline float vmax_lane(vfloat x) {
    return vmaxvq_f32(x);
}

// Sums in double: lanes 0-1 and 2-3.
struct vdouble {
    float64x2_t low, high;
};

inline vdouble vdouble_zero() {
    return {vdupq_n_f64(0), vdupq_n_f64(0)};
}

inline vdouble vadd_squares(vfloat x, vdouble sums) {
    const float64x2_t low = vcvt_f64_f32(vget_low_f32(x)), high = vcvt_high_f64_f32(x);
    return {vfmaq_f64(sums.low, low, low), vfmaq_f64(sums.high, high, high)};
}

inline double vdouble_sum(vdouble sums) {
    return vaddvq_f64(vaddq_f64(sums.low, sums.high));
}

// a0 a0 a1 a1 of p [2]
inline vfloat vtwice(const float *p) {
    const float32x2_t two = vld1_f32(p);
    return vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
}

// Pairs (a, b) become (a c - b s, b c + a s).
inline vfloat vrotate(vfloat x, vfloat c, vfloat s) {
    constexpr uint32_t minus[lanes] = {0x80000000u, 0, 0x80000000u, 0};
    const uint32x4_t crossed = vreinterpretq_u32_f32(vmul(vrev64q_f32(x), s));
    return vfma(x, c, vreinterpretq_f32_u32(veorq_u32(crossed, vld1q_u32(minus))));
}

inline float32x4_t float_of_halves(uint16x4_t halves) {
    return vcvt_f32_f16(vreinterpret_f16_u16(halves));
}

inline vfloat vload_half(const pi_half *p) {
    return float_of_halves(vld1_u16(p));
}

inline vfloat vload_bf16(const pi_bf16 *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}

inline void vstore_half(pi_half *p, vfloat x) {
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}

// A half in every lane.
inline vfloat vset_half(pi_half half) {
    return float_of_halves(vdup_n_u16(half));
}

inline uint32_t load_4_bytes(const void *p) {
    uint32_t value;
    __builtin_memcpy(&value, p, sizeof value);
    return value;
}

inline vfloat vload_i8(const int8_t *p) {
    const int16x8_t whole = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(load_4_bytes(p))));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(whole)));
}

// out [4 vectors] = the sixteen bytes
inline void float_of_bytes(int8x16_t bytes, vfloat *out) {
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    out[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    out[1] = vcvtq_f32_s32(vmovl_high_s16(low));
    out[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    out[3] = vcvtq_f32_s32(vmovl_high_s16(high));
}

// q - zero of the 32 nibbles: the low ones of qs [16], then the high ones.
inline void float_of_nibbles(const uint8_t *qs, int8_t zero, vfloat q[block_vectors]) {
    const uint8x16_t packed = vld1q_u8(qs);
    const uint8x16_t low = vandq_u8(packed, vdupq_n_u8(15)), high = vshrq_n_u8(packed, 4);
    float_of_bytes(vsubq_s8(vreinterpretq_s8_u8(low), vdupq_n_s8(zero)), q);
    float_of_bytes(vsubq_s8(vreinterpretq_s8_u8(high), vdupq_n_s8(zero)), q + block_vectors / 2);
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
    uint32x4_t largest = vdupq_n_u32(0);
    for (int64_t j = 0; j < block_vectors; ++j)
        largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(x[j])));
    return vfirst_lane(vreinterpretq_f32_u32(vdupq_n_u32(vmaxvq_u32(largest))));
}

// out [16] = the four vectors of whole numbers; returns their sum
inline int32_t store_16(const int32x4_t whole[4], int8_t *out) {
    const int16x8_t low = vcombine_s16(vmovn_s32(whole[0]), vmovn_s32(whole[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(whole[2]), vmovn_s32(whole[3]));
    const int8x16_t bytes = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
    vst1q_s8(out, bytes);
    return vaddlvq_s8(bytes);
}

// q [32] = x * factor rounded to the nearest even; sums [2] those of its halves.
inline void vstore_i8(const vfloat x[block_vectors], float factor, int8_t *q, int32_t sums[2]) {
    int32x4_t whole[block_vectors];
    for (int64_t j = 0; j < block_vectors; ++j)
        whole[j] = vcvtnq_s32_f32(vmul(x[j], vset(factor)));
    sums[0] = store_16(whole, q);
    sums[1] = store_16(whole + 4, q + 16);
}

} // namespace
