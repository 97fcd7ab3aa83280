// types.cuh: the tensor types on the device. A type reads `width` consecutive elements at a time, aligned to
// width, as a Packed in registers (load) and turns them into floats (unpack). k_quants.cuh has the others.
#pragma once

#include "device.cuh"
#include "layout.h"

namespace pi_cuda {

// One row: where it begins and its number of blocks.
struct RowView {
    const uint8_t *base;
    uint32_t n_blocks;
};

// Field f of block b.
template <int type, int f>
__device__ __forceinline__ const uint8_t *field(const RowView &row, uint32_t block) {
    constexpr uint32_t begin = field_begin<type, f>, n_bytes = layouts[type].fields[f].bytes;
    return row.base + uint64_t{row.n_blocks} * begin + block * n_bytes;
}

template <typename T>
__device__ __forceinline__ T read(const uint8_t *p) {
    return __ldg(reinterpret_cast<const T *>(p));
}

__device__ __forceinline__ float half_bits(uint16_t bits) {
    return __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ float2 two_halves(uint32_t bits) {
    return {half_bits(static_cast<uint16_t>(bits & 0xffffu)), half_bits(static_cast<uint16_t>(bits >> 16))};
}

// Byte i of a word less `bias`, without the slow conversion of integers: 2^23 + byte is a float whose low
// bits are the byte.
__device__ __forceinline__ float byte_float(uint32_t word, int i, float bias) {
    const uint32_t bits = __byte_perm(word, 0x4b000000u, 0x7540u | static_cast<uint32_t>(i));
    return __uint_as_float(bits) - (8388608.0f + bias);
}

// Four bytes as floats: out[i] = scale * (byte i - bias) + low.
__device__ __forceinline__ void four(uint32_t word, float bias, float scale, float low, float *out) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[i] = scale * byte_float(word, i, bias) + low;
}

__device__ __forceinline__ void four_bytes(uint32_t word, float bias, float *out) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        out[i] = byte_float(word, i, bias);
}

// Bits 0 to 3 of b into bit 0 of the four bytes.
__device__ __forceinline__ uint32_t spread_bits(uint32_t b) {
    return ((b & 15u) * 0x00204081u) & 0x01010101u;
}

// Four signed bytes of a table of 16 (as four words), chosen by the nibbles of the low half of `nibbles`.
__device__ __forceinline__ uint32_t look_up(uint32_t nibbles, const uint4 &table) {
    const uint32_t which = nibbles & 0x7777u;
    const uint32_t low = __byte_perm(table.x, table.y, which), high = __byte_perm(table.z, table.w, which);
    return __byte_perm(low, high, 0x3210u | (nibbles & 0x8888u) >> 1);
}

// 16 bytes of nibbles through a table: the low nibbles are elements 0 .. n - 1 of out, the high ones n .. 2 n
// - 1, where n is the number of bytes.
template <int n_words>
__device__ __forceinline__ void unpack_table(const uint32_t *words, float scale, const uint4 &table,
                                             float *out) {
#pragma unroll
    for (int w = 0; w < n_words; ++w) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t values = look_up(words[w] >> (16 * half), table) ^ 0x80808080u;
            float *low = out + 4 * w + 2 * half, *high = low + 4 * n_words;
            low[0] = scale * byte_float(values, 0, 128.0f);
            high[0] = scale * byte_float(values, 1, 128.0f);
            low[1] = scale * byte_float(values, 2, 128.0f);
            high[1] = scale * byte_float(values, 3, 128.0f);
        }
    }
}

template <int type>
struct Type;

// A type with one scale for a Packed also says quants() without it and scale(), so that a product of many
// elements multiplies by it once.
template <typename Of>
__device__ __forceinline__ void unpack_scaled(const typename Of::Packed &p, float *out) {
    Of::quants(p, out);
    const float scale = Of::scale(p);
#pragma unroll
    for (int i = 0; i < Of::width; ++i)
        out[i] *= scale;
}

template <>
struct Type<PI_KT_F32> {
    static constexpr int width = 4;
    using Packed = float4;
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        return read<float4>(row.base + 16 * uint64_t{i});
    }
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        out[0] = p.x, out[1] = p.y, out[2] = p.z, out[3] = p.w;
    }
};

// Eight elements of 16 bits at once.
struct SixteenBits {
    static constexpr int width = 8;
    using Packed = uint4;
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        return read<uint4>(row.base + 16 * uint64_t{i});
    }
};

template <>
struct Type<PI_KT_F16> : SixteenBits {
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        const uint32_t words[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const float2 pair = two_halves(words[w]);
            out[2 * w] = pair.x, out[2 * w + 1] = pair.y;
        }
    }
};

template <>
struct Type<PI_KT_BF16> : SixteenBits {
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        const uint32_t words[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            out[2 * w] = __uint_as_float(words[w] << 16);
            out[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
        }
    }
};

template <>
struct Type<PI_KT_Q8_0> {
    static constexpr int width = 16;
    struct Packed {
        uint4 q;
        uint16_t d;
    };
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        return {read<uint4>(field<PI_KT_Q8_0, 0>(row, 0) + 16 * uint64_t{i}),
                read<uint16_t>(field<PI_KT_Q8_0, 1>(row, i / 2))};
    }
    static __device__ __forceinline__ float scale(const Packed &p) { return half_bits(p.d); }
    static __device__ __forceinline__ void quants(const Packed &p, float *out) {
        const uint32_t words[4] = {p.q.x, p.q.y, p.q.z, p.q.w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
            four_bytes(words[w] ^ 0x80808080u, 128.0f, out + 4 * w);
    }
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        unpack_scaled<Type>(p, out);
    }
};

// Nibble types of 32 elements: 16 bytes of quants, up to 4 bytes of scales.
template <int type, typename Scale>
struct Nibbles {
    static constexpr int width = 32;
    struct Packed {
        uint4 q;
        Scale d;
    };
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        return {read<uint4>(field<type, 0>(row, i)), read<Scale>(field<type, 1>(row, i))};
    }
    static __device__ __forceinline__ void linear(const uint4 &q, float bias, float scale, float low,
                                                  float *out) {
        const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            four(words[w] & 0x0f0f0f0fu, bias, scale, low, out + 4 * w);
            four(words[w] >> 4 & 0x0f0f0f0fu, bias, scale, low, out + 16 + 4 * w);
        }
    }
};

template <>
struct Type<PI_KT_Q4_0> : Nibbles<PI_KT_Q4_0, uint16_t> {
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        unpack_scaled<Type>(p, out);
    }
    static __device__ __forceinline__ float scale(const Packed &p) { return half_bits(p.d); }
    static __device__ __forceinline__ void quants(const Packed &p, float *out) {
        const uint32_t words[4] = {p.q.x, p.q.y, p.q.z, p.q.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            four_bytes(words[w] & 0x0f0f0f0fu, 8.0f, out + 4 * w);
            four_bytes(words[w] >> 4 & 0x0f0f0f0fu, 8.0f, out + 16 + 4 * w);
        }
    }
};

template <>
struct Type<PI_KT_Q4_1> : Nibbles<PI_KT_Q4_1, uint32_t> {
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        const float2 d = two_halves(p.d);
        linear(p.q, 0.0f, d.x, d.y, out);
    }
};

template <>
struct Type<PI_KT_IQ4_NL> : Nibbles<PI_KT_IQ4_NL, uint16_t> {
    // -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113
    static __device__ __forceinline__ void quants(const Packed &p, float *out) {
        const uint4 table = {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u};
        const uint32_t words[4] = {p.q.x, p.q.y, p.q.z, p.q.w};
        unpack_table<4>(words, 1.0f, table, out);
    }
    static __device__ __forceinline__ float scale(const Packed &p) { return half_bits(p.d); }
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        unpack_scaled<Type>(p, out);
    }
};

// E2M1, doubled: 0 1 2 3 | 4 6 8 12 | 0 -1 -2 -3 | -4 -6 -8 -12
__device__ __forceinline__ uint4 e2m1_table() {
    return {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
}

template <>
struct Type<PI_KT_MXFP4> : Nibbles<PI_KT_MXFP4, uint8_t> {
    static __device__ __forceinline__ void quants(const Packed &p, float *out) {
        const uint32_t words[4] = {p.q.x, p.q.y, p.q.z, p.q.w};
        unpack_table<4>(words, 1.0f, e2m1_table(), out);
    }
    static __device__ __forceinline__ float scale(const Packed &p) {
        const uint32_t e = p.d;
        return 0.5f * __uint_as_float(e << 23 | (e == 0 ? 1u << 22 : 0u));
    }
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        unpack_scaled<Type>(p, out);
    }
};

template <>
struct Type<PI_KT_NVFP4> {
    static constexpr int width = 32; // two of a block's four sub-blocks
    struct Packed {
        uint4 q;
        uint16_t d;
    };
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        return {read<uint4>(field<PI_KT_NVFP4, 0>(row, 0) + 16 * uint64_t{i}),
                read<uint16_t>(field<PI_KT_NVFP4, 1>(row, 0) + 2 * uint64_t{i})};
    }
    // Half of an unsigned E4M3; 0x7f is its NaN and counts as 0.
    static __device__ __forceinline__ float scale(uint32_t x) {
        const uint32_t exponent = x >> 3 & 15u, mantissa = x & 7u;
        const float small = static_cast<float>(mantissa) * 0x1p-10f;
        const float normal =
            (1.0f + static_cast<float>(mantissa) / 8.0f) * __uint_as_float((exponent + (127 - 8)) << 23);
        return x == 0x7f ? 0.0f : exponent == 0 ? small : normal;
    }
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        const uint32_t words[4] = {p.q.x, p.q.y, p.q.z, p.q.w};
        unpack_table<2>(words, scale(p.d & 0xffu), e2m1_table(), out);
        unpack_table<2>(words + 2, scale(p.d >> 8), e2m1_table(), out + 16);
    }
};

// The fifth bits of 32 elements beside their nibbles.
template <int type, typename Scale>
struct FiveBits {
    static constexpr int width = 32;
    struct Packed {
        uint4 q;
        uint32_t high;
        Scale d;
    };
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        return {read<uint4>(field<type, 0>(row, i)), read<uint32_t>(field<type, 1>(row, i)),
                read<Scale>(field<type, 2>(row, i))};
    }
    static __device__ __forceinline__ void linear(const Packed &p, float bias, float scale, float low,
                                                  float *out) {
        const uint32_t words[4] = {p.q.x, p.q.y, p.q.z, p.q.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const uint32_t a = (words[w] & 0x0f0f0f0fu) | spread_bits(p.high >> (4 * w)) << 4;
            const uint32_t b = (words[w] >> 4 & 0x0f0f0f0fu) | spread_bits(p.high >> (16 + 4 * w)) << 4;
            four(a, bias, scale, low, out + 4 * w);
            four(b, bias, scale, low, out + 16 + 4 * w);
        }
    }
};

template <>
struct Type<PI_KT_Q5_0> : FiveBits<PI_KT_Q5_0, uint16_t> {
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        linear(p, 16.0f, half_bits(p.d), 0.0f, out);
    }
};

template <>
struct Type<PI_KT_Q5_1> : FiveBits<PI_KT_Q5_1, uint32_t> {
    static __device__ __forceinline__ void unpack(const Packed &p, float *out) {
        const float2 d = two_halves(p.d);
        linear(p, 0.0f, d.x, d.y, out);
    }
};

} // namespace pi_cuda
