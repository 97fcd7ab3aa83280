// types.cuh: the tensor types on the device. A type reads `width` consecutive elements at a time, aligned to
// width, as a Packed in registers (load) and turns them into floats (unpack) or bytes and scales.
// k_quants.cuh has the others.
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
    return row.base + (row.n_blocks * begin + block * n_bytes); // a row is below 4 GiB
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

// Byte i of a word of signed bytes, less `bias`, without the slow conversion of integers: 2^23 + byte is a
// float whose low bits are the byte.
__device__ __forceinline__ float byte_float(uint32_t flipped, int i, float bias) {
    const uint32_t bits = __byte_perm(flipped, 0x4b000000u, 0x7540u | static_cast<uint32_t>(i));
    return __uint_as_float(bits) - (8388608.0f + 128.0f + bias);
}
constexpr uint32_t signs = 0x80808080u; // flipped: a signed byte plus 128

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

// Four bytes of nibbles through a table: low the low nibbles, high the high ones.
__device__ __forceinline__ void look_up(uint32_t word, const uint4 &table, uint32_t &low, uint32_t &high) {
    const uint32_t a = look_up(word, table), b = look_up(word >> 16, table);
    low = __byte_perm(a, b, 0x6420u);
    high = __byte_perm(a, b, 0x7531u);
}

template <int type>
struct Type;

// Types of floats give values by floats(). The others give signed bytes in words, and for each of the
// `groups` equal parts of a Packed a scale and a minimum: value = scale * (byte - bias) (+ minimum where
// `has_minimum`).
template <int type>
constexpr bool is_quantised = requires { Type<type>::bias; };

// Slices that a thread has on their way of each row that it reads.
template <int type>
constexpr uint32_t slices_ahead = sizeof(typename Type<type>::Packed) <= 32 ? 4 : 2;

// Slices i and i + 1 of a row, i even; what lies beyond the last one is any.
template <int type>
__device__ __forceinline__ void load_pair(const RowView &row, uint32_t i, uint32_t last,
                                          typename Type<type>::Packed &a, typename Type<type>::Packed &b) {
    using T = Type<type>;
    const uint32_t first = min(i, last & ~1u), second = min(i + 1, last);
    if constexpr (requires { T::load_scales(row, i); }) {
        a = T::load(row, first, 0), b = T::load(row, second, 0);
        const uint32_t scales = T::load_scales(row, first);
        a.d = static_cast<uint16_t>(scales & 0xffffu);
        b.d = static_cast<uint16_t>(second > first ? scales >> 16 : 0);
    } else {
        a = T::load(row, first);
        b = T::load(row, second);
    }
}

// out[i] += factor * value i
template <int type>
__device__ __forceinline__ void add_values(const typename Type<type>::Packed &p, float factor, float *out) {
    using T = Type<type>;
    if constexpr (is_quantised<type>) {
        constexpr int group = T::width / T::groups;
        uint32_t words[T::width / 4];
        T::bytes(p, words);
#pragma unroll
        for (int g = 0; g < T::groups; ++g) {
            const float2 scales = T::scales(p, g);
            const float scale = factor * scales.x, minimum = factor * scales.y;
#pragma unroll
            for (int i = g * group; i < (g + 1) * group; ++i) {
                out[i] += scale * byte_float(words[i / 4] ^ signs, i % 4, T::bias);
                if constexpr (T::has_minimum)
                    out[i] += minimum;
            }
        }
    } else {
        float values[T::width];
        T::floats(p, values);
#pragma unroll
        for (int i = 0; i < T::width; ++i)
            out[i] += factor * values[i];
    }
}

template <int type>
__device__ __forceinline__ void unpack(const typename Type<type>::Packed &p, float *out) {
#pragma unroll
    for (int i = 0; i < Type<type>::width; ++i)
        out[i] = 0.0f;
    add_values<type>(p, 1.0f, out);
}

template <>
struct Type<PI_KT_F32> {
    static constexpr int width = 4;
    using Packed = float4;
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        return read<float4>(row.base + 16 * uint64_t{i});
    }
    static __device__ __forceinline__ void floats(const Packed &p, float *out) {
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
    static __device__ __forceinline__ void floats(const Packed &p, float *out) {
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
    static __device__ __forceinline__ void floats(const Packed &p, float *out) {
        const uint32_t words[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            out[2 * w] = __uint_as_float(words[w] << 16);
            out[2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
        }
    }
};

// What most quantised types have.
struct Quantised {
    static constexpr int groups = 1, bias = 0;
    static constexpr bool has_minimum = false;
};

template <>
struct Type<PI_KT_Q8_0> : Quantised {
    static constexpr int width = 16;
    struct Packed {
        uint4 q;
        uint16_t d;
    };
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        return {read<uint4>(field<PI_KT_Q8_0, 0>(row, 0) + 16 * uint64_t{i}),
                read<uint16_t>(field<PI_KT_Q8_0, 1>(row, i / 2))};
    }
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i, uint16_t d) {
        return {read<uint4>(field<PI_KT_Q8_0, 0>(row, 0) + 16 * i), d};
    }
    static __device__ __forceinline__ uint32_t load_scales(const RowView &row, uint32_t i) {
        return read<uint16_t>(field<PI_KT_Q8_0, 1>(row, i / 2)) * 0x10001u;
    }
    static __device__ __forceinline__ void bytes(const Packed &p, uint32_t *words) {
        words[0] = p.q.x, words[1] = p.q.y, words[2] = p.q.z, words[3] = p.q.w;
    }
    static __device__ __forceinline__ float2 scales(const Packed &p, int) { return {half_bits(p.d), 0.0f}; }
};

// Nibble types of 32 elements: 16 bytes of quants, up to 4 bytes of scales.
template <int type, typename Scale>
struct Nibbles : Quantised {
    static constexpr int width = 32;
    struct Packed {
        uint4 q;
        Scale d;
    };
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        return {read<uint4>(field<type, 0>(row, i)), read<Scale>(field<type, 1>(row, i))};
    }
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i, uint16_t d) {
        return {read<uint4>(field<type, 0>(row, i)), d};
    }
    // Of blocks i and i + 1, i even.
    static __device__ __forceinline__ uint32_t load_scales(const RowView &row, uint32_t i)
        requires(sizeof(Scale) == 2)
    {
        return read<uint32_t>(field<type, 1>(row, i));
    }
    static __device__ __forceinline__ void bytes(const Packed &p, uint32_t *words) {
        const uint32_t q[4] = {p.q.x, p.q.y, p.q.z, p.q.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            words[w] = q[w] & 0x0f0f0f0fu;
            words[4 + w] = q[w] >> 4 & 0x0f0f0f0fu;
        }
    }
};

template <>
struct Type<PI_KT_Q4_0> : Nibbles<PI_KT_Q4_0, uint16_t> {
    static constexpr int bias = 8;
    static __device__ __forceinline__ float2 scales(const Packed &p, int) { return {half_bits(p.d), 0.0f}; }
};

template <>
struct Type<PI_KT_Q4_1> : Nibbles<PI_KT_Q4_1, uint32_t> {
    static constexpr bool has_minimum = true;
    static __device__ __forceinline__ float2 scales(const Packed &p, int) { return two_halves(p.d); }
};

// Nibbles that number the values of a table.
__device__ __forceinline__ void table_bytes(const uint4 &quants, const uint4 &table, uint32_t *words) {
    const uint32_t q[4] = {quants.x, quants.y, quants.z, quants.w};
#pragma unroll
    for (int w = 0; w < 4; ++w)
        look_up(q[w], table, words[w], words[4 + w]);
}

template <>
struct Type<PI_KT_IQ4_NL> : Nibbles<PI_KT_IQ4_NL, uint16_t> {
    // -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113
    static __device__ __forceinline__ void bytes(const Packed &p, uint32_t *words) {
        table_bytes(p.q, {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}, words);
    }
    static __device__ __forceinline__ float2 scales(const Packed &p, int) { return {half_bits(p.d), 0.0f}; }
};

// E2M1, doubled: 0 1 2 3 | 4 6 8 12 | 0 -1 -2 -3 | -4 -6 -8 -12
__device__ __forceinline__ uint4 e2m1_table() {
    return {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu};
}

template <>
struct Type<PI_KT_MXFP4> : Nibbles<PI_KT_MXFP4, uint8_t> {
    static __device__ __forceinline__ void bytes(const Packed &p, uint32_t *words) {
        table_bytes(p.q, e2m1_table(), words);
    }
    static __device__ __forceinline__ float2 scales(const Packed &p, int) {
        const uint32_t e = p.d;
        return {0.5f * __uint_as_float(e << 23 | (e == 0 ? 1u << 22 : 0u)), 0.0f};
    }
};

template <>
struct Type<PI_KT_NVFP4> : Quantised {
    static constexpr int width = 32, groups = 2; // two of a block's four sub-blocks
    struct Packed {
        uint4 q;
        uint16_t d;
    };
    static __device__ __forceinline__ Packed load(const RowView &row, uint32_t i) {
        return {read<uint4>(field<PI_KT_NVFP4, 0>(row, 0) + 16 * uint64_t{i}),
                read<uint16_t>(field<PI_KT_NVFP4, 1>(row, 0) + 2 * uint64_t{i})};
    }
    static __device__ __forceinline__ void bytes(const Packed &p, uint32_t *words) {
        const uint4 table = e2m1_table();
        look_up(p.q.x, table, words[0], words[2]);
        look_up(p.q.y, table, words[1], words[3]);
        look_up(p.q.z, table, words[4], words[6]);
        look_up(p.q.w, table, words[5], words[7]);
    }
    // Half of an unsigned E4M3; 0x7f is its NaN and counts as 0.
    static __device__ __forceinline__ float2 scales(const Packed &p, int g) {
        const uint32_t x = static_cast<uint32_t>(p.d) >> (8 * g) & 0xffu;
        const uint32_t exponent = x >> 3 & 15u, mantissa = x & 7u;
        const float small = static_cast<float>(mantissa) * 0x1p-10f;
        const float normal =
            (1.0f + static_cast<float>(mantissa) / 8.0f) * __uint_as_float((exponent + (127 - 8)) << 23);
        return {x == 0x7f ? 0.0f : exponent == 0 ? small : normal, 0.0f};
    }
};

// The fifth bits of 32 elements beside their nibbles.
template <int type, typename Scale>
struct FiveBits : Quantised {
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
    static __device__ __forceinline__ void bytes(const Packed &p, uint32_t *words) {
        const uint32_t q[4] = {p.q.x, p.q.y, p.q.z, p.q.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            words[w] = (q[w] & 0x0f0f0f0fu) | spread_bits(p.high >> (4 * w)) << 4;
            words[4 + w] = (q[w] >> 4 & 0x0f0f0f0fu) | spread_bits(p.high >> (16 + 4 * w)) << 4;
        }
    }
};

template <>
struct Type<PI_KT_Q5_0> : FiveBits<PI_KT_Q5_0, uint16_t> {
    static constexpr int bias = 16;
    static __device__ __forceinline__ float2 scales(const Packed &p, int) { return {half_bits(p.d), 0.0f}; }
};

template <>
struct Type<PI_KT_Q5_1> : FiveBits<PI_KT_Q5_1, uint32_t> {
    static constexpr bool has_minimum = true;
    static __device__ __forceinline__ float2 scales(const Packed &p, int) { return two_halves(p.d); }
};

} // namespace pi_cuda
