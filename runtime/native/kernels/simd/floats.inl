// floats.inl: rows of F32, F16 and BF16 are plain arrays; 32 elements in a row count as a block, the last of
// which may be short.

#pragma once

namespace {

// Value supplies Element, load (a whole vector) and load_part (its first n lanes, zeros after).
template <typename Value>
struct FloatType {
    static constexpr bool any_length = true;
    static constexpr int64_t block_bytes = PI_QK * sizeof(typename Value::Element);

    static void unpack(const void *block, vfloat out[block_vectors]) {
        const auto *p = static_cast<const typename Value::Element *>(block);
        for (int64_t j = 0; j < block_vectors; ++j)
            out[j] = Value::load(p + j * lanes);
    }

    static void unpack_part(const void *block, int64_t n, vfloat out[block_vectors]) {
        const auto *p = static_cast<const typename Value::Element *>(block);
        for (int64_t j = 0; j < block_vectors; ++j) {
            out[j] = n >= lanes ? Value::load(p + j * lanes)
                     : n > 0    ? Value::load_part(p + j * lanes, n)
                                : vzero();
            n -= lanes;
        }
    }
};

struct F32Value {
    using Element = float;
    static vfloat load(const float *p) { return vload(p); }
    static vfloat load_part(const float *p, int64_t n) { return vload_part(p, n); }
};

struct F16Value {
    using Element = pi_half;
    static vfloat load(const pi_half *p) { return vload_half(p); }
    static vfloat load_part(const pi_half *p, int64_t n) {
        pi_half padded[lanes] = {};
        for (int64_t i = 0; i < n; ++i)
            padded[i] = p[i];
        return vload_half(padded);
    }
};

struct BF16Value {
    using Element = pi_bf16;
    static vfloat load(const pi_bf16 *p) { return vload_bf16(p); }
    static vfloat load_part(const pi_bf16 *p, int64_t n) {
        pi_bf16 padded[lanes] = {};
        for (int64_t i = 0; i < n; ++i)
            padded[i] = p[i];
        return vload_bf16(padded);
    }
};

using F32 = FloatType<F32Value>;
using F16 = FloatType<F16Value>;
using BF16 = FloatType<BF16Value>;

} // namespace
