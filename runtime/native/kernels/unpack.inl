// unpack.inl: blocks of the types that have no vector code of their own, as floats. Plain loops that a
// compiler vectorises; products and sums are rounded one by one, as the formats' definition has it
// (-ffp-contract=off).

#pragma once

#include "blocks.h"
#include "half.inl"

namespace {

inline void unpack(const pi_block_q5_0 &block, float *out) {
    const float d = float_of_half(block.d);
    uint32_t high;
    __builtin_memcpy(&high, block.qh, sizeof high);
    for (int j = 0; j < PI_QK / 2; ++j) {
        out[j] = d * static_cast<float>(static_cast<int>((block.qs[j] & 15u) | (high >> j & 1u) << 4) - 16);
        out[j + 16] =
            d * static_cast<float>(static_cast<int>(block.qs[j] >> 4 | (high >> (j + 16) & 1u) << 4) - 16);
    }
}

inline void unpack(const pi_block_q5_1 &block, float *out) {
    const float d = float_of_half(block.d), m = float_of_half(block.m);
    uint32_t high;
    __builtin_memcpy(&high, block.qh, sizeof high);
    for (int j = 0; j < PI_QK / 2; ++j) {
        out[j] = d * static_cast<float>((block.qs[j] & 15u) | (high >> j & 1u) << 4) + m;
        out[j + 16] =
            d * static_cast<float>(static_cast<uint32_t>(block.qs[j] >> 4) | (high >> (j + 16) & 1u) << 4) +
            m;
    }
}

constexpr float iq4_nl_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                     1,    13,   25,  38,  53,  69,  89,  113};
constexpr float e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// n bytes: the low nibbles are elements 0 .. n - 1, the high ones n .. 2 n - 1.
inline void unpack_table(const uint8_t *qs, int n, float d, const float table[16], float *out) {
    for (int j = 0; j < n; ++j) {
        out[j] = d * table[qs[j] & 15];
        out[j + n] = d * table[qs[j] >> 4];
    }
}

inline void unpack(const pi_block_iq4_nl &block, float *out) {
    unpack_table(block.qs, PI_QK / 2, float_of_half(block.d), iq4_nl_values, out);
}

// Half of 2^(e - 127), since the table holds doubled values; 2^-127 is subnormal.
inline float half_of_e8m0(uint8_t e) {
    return 0.5f * float_of_bits(static_cast<uint32_t>(e) << 23 | static_cast<uint32_t>(e == 0) << 22);
}

inline void unpack(const pi_block_mxfp4 &block, float *out) {
    unpack_table(block.qs, PI_QK / 2, half_of_e8m0(block.e), e2m1_doubled, out);
}

// Half of an unsigned E4M3 (bias 7); 0x7f is its NaN and counts as 0.
inline float half_of_e4m3(uint8_t x) {
    if (x == 0 || x == 0x7f)
        return 0;
    const int exponent = x >> 3 & 15;
    const auto mantissa = static_cast<float>(x & 7);
    if (exponent == 0)
        return mantissa * 0x1p-10f;
    return (1.0f + mantissa / 8.0f) * float_of_bits(static_cast<uint32_t>(exponent - 8 + 127) << 23);
}

inline void unpack(const pi_block_nvfp4 &block, float *out) {
    for (int s = 0; s < 4; ++s)
        unpack_table(block.qs + 8 * s, 8, half_of_e4m3(block.d[s]), e2m1_doubled, out + 16 * s);
}

inline void unpack(const pi_block_q2_k &block, float *out) {
    const float d = float_of_half(block.d), dmin = float_of_half(block.dmin);
    for (int s = 0; s < 16; ++s) {
        const float scale = d * static_cast<float>(block.scales[s] & 15),
                    low = dmin * static_cast<float>(block.scales[s] >> 4);
        const uint8_t *qs = block.qs + 32 * (s / 8) + 16 * (s % 2);
        const int shift = 2 * (s / 2 % 4);
        for (int j = 0; j < 16; ++j)
            out[16 * s + j] = scale * static_cast<float>(qs[j] >> shift & 3) - low;
    }
}

inline int q3_k_scale(const uint8_t packed[12], int s) {
    const int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
    return (low | (packed[8 + s % 4] >> (2 * (s / 4)) & 3) << 4) - 32;
}

inline void unpack(const pi_block_q3_k &block, float *out) {
    const float d = float_of_half(block.d);
    for (int s = 0; s < 16; ++s) {
        const float scale = d * static_cast<float>(q3_k_scale(block.scales, s));
        const uint8_t *qs = block.qs + 32 * (s / 8) + 16 * (s % 2), *high = block.hmask + 16 * (s % 2);
        const int shift = 2 * (s / 2 % 4), bit = s / 2;
        for (int j = 0; j < 16; ++j) {
            const int q = (qs[j] >> shift & 3) - ((high[j] >> bit & 1) != 0 ? 0 : 4);
            out[16 * s + j] = scale * static_cast<float>(q);
        }
    }
}

// Scale and minimum of sub-block s < 8 of Q4_K and Q5_K.
inline void k_scale(const uint8_t packed[12], int s, float *scale, float *low) {
    if (s < 4) {
        *scale = static_cast<float>(packed[s] & 63);
        *low = static_cast<float>(packed[s + 4] & 63);
        return;
    }
    *scale = static_cast<float>((packed[s + 4] & 15) | packed[s - 4] >> 6 << 4);
    *low = static_cast<float>(packed[s + 4] >> 4 | packed[s] >> 6 << 4);
}

inline void unpack(const pi_block_q4_k &block, float *out) {
    const float d = float_of_half(block.d), dmin = float_of_half(block.dmin);
    for (int s = 0; s < 8; ++s) {
        float scale, low;
        k_scale(block.scales, s, &scale, &low);
        scale *= d;
        low *= dmin;
        const uint8_t *qs = block.qs + 32 * (s / 2);
        for (int j = 0; j < 32; ++j)
            out[32 * s + j] = scale * static_cast<float>(qs[j] >> (4 * (s % 2)) & 15) - low;
    }
}

inline void unpack(const pi_block_q5_k &block, float *out) {
    const float d = float_of_half(block.d), dmin = float_of_half(block.dmin);
    for (int s = 0; s < 8; ++s) {
        float scale, low;
        k_scale(block.scales, s, &scale, &low);
        scale *= d;
        low *= dmin;
        const uint8_t *qs = block.qs + 32 * (s / 2);
        for (int j = 0; j < 32; ++j) {
            const int q = (qs[j] >> (4 * (s % 2)) & 15) | (block.qh[j] >> s & 1) << 4;
            out[32 * s + j] = scale * static_cast<float>(q) - low;
        }
    }
}

inline void unpack(const pi_block_q6_k &block, float *out) {
    const float d = float_of_half(block.d);
    for (int s = 0; s < 16; ++s) {
        const float scale = d * static_cast<float>(block.scales[s]);
        const int half = s / 8, k = s / 2 % 4, begin = 16 * (s % 2); // elements 128 half + 32 k + begin ..
        const uint8_t *low = block.ql + 64 * half + 32 * (k % 2) + begin,
                      *high = block.qh + 32 * half + begin;
        for (int j = 0; j < 16; ++j) {
            const int q = (low[j] >> (4 * (k / 2)) & 15) | (high[j] >> (2 * k) & 3) << 4;
            out[16 * s + j] = scale * static_cast<float>(q - 32);
        }
    }
}

template <typename Block>
constexpr int64_t block_elements = PI_QK_K;
template <>
constexpr int64_t block_elements<pi_block_q5_0> = PI_QK;
template <>
constexpr int64_t block_elements<pi_block_q5_1> = PI_QK;
template <>
constexpr int64_t block_elements<pi_block_iq4_nl> = PI_QK;
template <>
constexpr int64_t block_elements<pi_block_mxfp4> = PI_QK;
template <>
constexpr int64_t block_elements<pi_block_nvfp4> = 64;

} // namespace
