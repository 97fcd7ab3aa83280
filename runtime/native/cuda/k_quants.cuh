// k_quants.cuh: types of 256-element blocks, 32 elements at a time: part t of a block, or two sub-blocks
// of 16.
#pragma once

#include "types.cuh"

namespace pi_cuda {

// 32 bytes of which a part uses some bits each.
struct Bytes32 {
    uint32_t word[8];
};

__device__ __forceinline__ Bytes32 read32(const uint8_t *p) {
    const uint4 a = read<uint4>(p), b = read<uint4>(p + 16);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

template <>
struct Type<PI_KT_Q2_K> {
    static constexpr int width = 32;
    struct Packed {
        Bytes32 q;
        uint32_t d; // and dmin
        uint16_t scales;
        uint16_t shift;
    };
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        const uint32_t block = i / 8, t = i % 8;
        return {read32(field<PI_KT_Q2_K, 0>(row, block) + 32 * (t / 4)),
                read<uint32_t>(field<PI_KT_Q2_K, 2>(row, block)),
                read<uint16_t>(field<PI_KT_Q2_K, 1>(row, block) + 2 * t), static_cast<uint16_t>(2 * (t % 4))};
    }
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        const float2 d = two_halves(p.d);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const uint32_t packed = p.scales >> (8 * s);
            const float scale = d.x * static_cast<float>(packed & 15u),
                        low = d.y * static_cast<float>(packed >> 4 & 15u);
#pragma unroll
            for (int w = 0; w < 4; ++w)
                four(p.q.word[4 * s + w] >> p.shift & 0x03030303u, 0.0f, scale, -low, out + 16 * s + 4 * w);
        }
    }
};

template <>
struct Type<PI_KT_Q3_K> {
    static constexpr int width = 32;
    struct Packed {
        Bytes32 q;
        Bytes32 high;
        float scale[2];
        uint16_t d;
        uint16_t t;
    };
    static __device__ __forceinline__ float scale_of(const uint8_t *packed, uint32_t s) {
        const uint32_t low = s < 8 ? read<uint8_t>(packed + s) & 15u : read<uint8_t>(packed + s - 8) >> 4;
        const uint32_t high = read<uint8_t>(packed + 8 + s % 4) >> (2 * (s / 4)) & 3u;
        return static_cast<float>(static_cast<int>(low | high << 4) - 32);
    }
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        const uint32_t block = i / 8, t = i % 8;
        const uint8_t *scales = field<PI_KT_Q3_K, 2>(row, block);
        return {read32(field<PI_KT_Q3_K, 0>(row, block) + 32 * (t / 4)),
                read32(field<PI_KT_Q3_K, 1>(row, block)),
                {scale_of(scales, 2 * t), scale_of(scales, 2 * t + 1)},
                read<uint16_t>(field<PI_KT_Q3_K, 3>(row, block)),
                static_cast<uint16_t>(t)};
    }
    // q - 4 where the high bit is clear: the third bit of q + 4 * high, less 4
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        const float d = half_bits(p.d);
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const uint32_t low = p.q.word[w] >> (2 * (p.t % 4)) & 0x03030303u;
            const uint32_t high = p.high.word[w] >> p.t & 0x01010101u;
            four(low | high << 2, 4.0f, d * p.scale[w / 4], 0.0f, out + 4 * w);
        }
    }
};

// The header of Q4_K and Q5_K: d, dmin, then scale and minimum of 8 parts in 6 bits each.
__device__ __forceinline__ void part_scale(const uint4 &header, uint32_t t, float *scale, float *low) {
    const uint32_t words[3] = {header.y, header.z, header.w}; // bytes 0-3, 4-7, 8-11
    const uint32_t shift = 8 * (t % 4);
    const uint32_t a = words[0] >> shift & 0xffu, b = words[1] >> shift & 0xffu,
                   c = words[2] >> shift & 0xffu;
    const float2 d = two_halves(header.x);
    const uint32_t s = t < 4 ? a & 63u : (c & 15u) | a >> 6 << 4;
    const uint32_t m = t < 4 ? b & 63u : c >> 4 | b >> 6 << 4;
    *scale = d.x * static_cast<float>(s);
    *low = d.y * static_cast<float>(m);
}

template <>
struct Type<PI_KT_Q4_K> {
    static constexpr int width = 32;
    struct Packed {
        Bytes32 q;
        uint4 header;
        uint32_t t;
    };
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        const uint32_t block = i / 8, t = i % 8;
        return {read32(field<PI_KT_Q4_K, 0>(row, block) + 32 * (t / 2)),
                read<uint4>(field<PI_KT_Q4_K, 1>(row, block)), t};
    }
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        float scale, low;
        part_scale(p.header, p.t, &scale, &low);
#pragma unroll
        for (int w = 0; w < 8; ++w)
            four(p.q.word[w] >> (4 * (p.t % 2)) & 0x0f0f0f0fu, 0.0f, scale, -low, out + 4 * w);
    }
};

template <>
struct Type<PI_KT_Q5_K> {
    static constexpr int width = 32;
    struct Packed {
        Bytes32 q;
        Bytes32 high;
        uint4 header;
        uint32_t t;
    };
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        const uint32_t block = i / 8, t = i % 8;
        return {read32(field<PI_KT_Q5_K, 0>(row, block) + 32 * (t / 2)),
                read32(field<PI_KT_Q5_K, 1>(row, block)), read<uint4>(field<PI_KT_Q5_K, 2>(row, block)), t};
    }
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        float scale, low;
        part_scale(p.header, p.t, &scale, &low);
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const uint32_t nibbles = p.q.word[w] >> (4 * (p.t % 2)) & 0x0f0f0f0fu;
            const uint32_t fifth = p.high.word[w] >> p.t & 0x01010101u;
            four(nibbles | fifth << 4, 0.0f, scale, -low, out + 4 * w);
        }
    }
};

template <>
struct Type<PI_KT_Q6_K> {
    static constexpr int width = 32;
    struct Packed {
        Bytes32 low;
        Bytes32 high;
        uint16_t scales;
        uint16_t d;
        uint32_t k;
    };
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        const uint32_t block = i / 8, t = i % 8, half = t / 4, k = t % 4;
        return {read32(field<PI_KT_Q6_K, 0>(row, block) + 64 * half + 32 * (k % 2)),
                read32(field<PI_KT_Q6_K, 1>(row, block) + 32 * half),
                read<uint16_t>(field<PI_KT_Q6_K, 2>(row, block) + 2 * t),
                read<uint16_t>(field<PI_KT_Q6_K, 3>(row, block)), k};
    }
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        const float d = half_bits(p.d);
        const float scale[2] = {d * static_cast<float>(static_cast<int8_t>(p.scales & 0xffu)),
                                d * static_cast<float>(static_cast<int8_t>(p.scales >> 8))};
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const uint32_t nibbles = p.low.word[w] >> (4 * (p.k / 2)) & 0x0f0f0f0fu;
            const uint32_t high = p.high.word[w] >> (2 * p.k) & 0x03030303u;
            four(nibbles | high << 4, 32.0f, scale[w / 4], 0.0f, out + 4 * w);
        }
    }
};

// Calls function.template operator()<type>() for the type of this number.
template <typename Function>
void for_type(uint32_t kernel_type, Function &&function) {
    switch (kernel_type) {
    case PI_KT_F32:
        return function.template operator()<PI_KT_F32>();
    case PI_KT_F16:
        return function.template operator()<PI_KT_F16>();
    case PI_KT_BF16:
        return function.template operator()<PI_KT_BF16>();
    case PI_KT_Q8_0:
        return function.template operator()<PI_KT_Q8_0>();
    case PI_KT_Q4_0:
        return function.template operator()<PI_KT_Q4_0>();
    case PI_KT_Q4_1:
        return function.template operator()<PI_KT_Q4_1>();
    case PI_KT_Q5_0:
        return function.template operator()<PI_KT_Q5_0>();
    case PI_KT_Q5_1:
        return function.template operator()<PI_KT_Q5_1>();
    case PI_KT_Q2_K:
        return function.template operator()<PI_KT_Q2_K>();
    case PI_KT_Q3_K:
        return function.template operator()<PI_KT_Q3_K>();
    case PI_KT_Q4_K:
        return function.template operator()<PI_KT_Q4_K>();
    case PI_KT_Q5_K:
        return function.template operator()<PI_KT_Q5_K>();
    case PI_KT_Q6_K:
        return function.template operator()<PI_KT_Q6_K>();
    case PI_KT_IQ4_NL:
        return function.template operator()<PI_KT_IQ4_NL>();
    case PI_KT_MXFP4:
        return function.template operator()<PI_KT_MXFP4>();
    case PI_KT_NVFP4:
        return function.template operator()<PI_KT_NVFP4>();
    default:
        throw Failure{PI_FAILURE, "a tensor type without device kernels"};
    }
}

} // namespace pi_cuda
