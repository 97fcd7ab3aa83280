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
struct Type<PI_KT_Q2_K> : Quantised {
    static constexpr int width = 32, groups = 2;
    static constexpr bool has_minimum = true;
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
    static __device__ __forceinline__ void bytes(const Packed &p, uint32_t *words) {
#pragma unroll
        for (int w = 0; w < 8; ++w)
            words[w] = p.q.word[w] >> p.shift & 0x03030303u;
    }
    static __device__ __forceinline__ float2 scales(const Packed &p, int g) {
        const float2 d = two_halves(p.d);
        const uint32_t packed = static_cast<uint32_t>(p.scales) >> (8 * g);
        return {d.x * static_cast<float>(packed & 15u), -d.y * static_cast<float>(packed >> 4 & 15u)};
    }
};

template <>
struct Type<PI_KT_Q3_K> : Quantised {
    static constexpr int width = 32, groups = 2, bias = 4;
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
    static __device__ __forceinline__ void bytes(const Packed &p, uint32_t *words) {
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const uint32_t low = p.q.word[w] >> (2 * (p.t % 4)) & 0x03030303u;
            words[w] = low | (p.high.word[w] >> p.t & 0x01010101u) << 2;
        }
    }
    static __device__ __forceinline__ float2 scales(const Packed &p, int g) {
        return {half_bits(p.d) * p.scale[g], 0.0f};
    }
};

// The header of Q4_K and Q5_K: d, dmin, then scale and minimum of 8 parts in 6 bits each.
__device__ __forceinline__ float2 part_scales(const uint4 &header, uint32_t t) {
    const uint32_t words[3] = {header.y, header.z, header.w}; // bytes 0-3, 4-7, 8-11
    const uint32_t shift = 8 * (t % 4);
    const uint32_t a = words[0] >> shift & 0xffu, b = words[1] >> shift & 0xffu,
                   c = words[2] >> shift & 0xffu;
    const float2 d = two_halves(header.x);
    const uint32_t s = t < 4 ? a & 63u : (c & 15u) | a >> 6 << 4;
    const uint32_t m = t < 4 ? b & 63u : c >> 4 | b >> 6 << 4;
    return {d.x * static_cast<float>(s), -d.y * static_cast<float>(m)};
}

template <>
struct Type<PI_KT_Q4_K> : Quantised {
    static constexpr int width = 32;
    static constexpr bool has_minimum = true;
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
    static __device__ __forceinline__ void bytes(const Packed &p, uint32_t *words) {
#pragma unroll
        for (int w = 0; w < 8; ++w)
            words[w] = p.q.word[w] >> (4 * (p.t % 2)) & 0x0f0f0f0fu;
    }
    static __device__ __forceinline__ float2 scales(const Packed &p, int) {
        return part_scales(p.header, p.t);
    }
};

template <>
struct Type<PI_KT_Q5_K> : Quantised {
    static constexpr int width = 32;
    static constexpr bool has_minimum = true;
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
    static __device__ __forceinline__ void bytes(const Packed &p, uint32_t *words) {
#pragma unroll
        for (int w = 0; w < 8; ++w)
            words[w] = (p.q.word[w] >> (4 * (p.t % 2)) & 0x0f0f0f0fu) | (p.high.word[w] >> p.t & 0x01010101u)
                                                                            << 4;
    }
    static __device__ __forceinline__ float2 scales(const Packed &p, int) {
        return part_scales(p.header, p.t);
    }
};

template <>
struct Type<PI_KT_Q6_K> : Quantised {
    static constexpr int width = 32, groups = 2, bias = 32;
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
    static __device__ __forceinline__ void bytes(const Packed &p, uint32_t *words) {
#pragma unroll
        for (int w = 0; w < 8; ++w)
            words[w] = (p.low.word[w] >> (4 * (p.k / 2)) & 0x0f0f0f0fu) |
                       (p.high.word[w] >> (2 * p.k) & 0x03030303u) << 4;
    }
    static __device__ __forceinline__ float2 scales(const Packed &p, int g) {
        const auto scale = static_cast<int8_t>(static_cast<uint32_t>(p.scales) >> (8 * g) & 0xffu);
        return {half_bits(p.d) * static_cast<float>(scale), 0.0f};
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
