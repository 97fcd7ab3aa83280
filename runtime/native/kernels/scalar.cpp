// scalar.cpp: the reference, one plain loop for each kernel. Every other table is tested against it.
#include "half.inl"
#include "kernels.h"

#include <math.h>

namespace {

// Round to nearest even; too large becomes infinity, NaN a quiet NaN.
pi_half half_of_float(float value) {
    const uint32_t bits = bits_of_float(value);
    const uint32_t sign = bits >> 16 & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) { // 65520, half way beyond the largest half
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) { // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
        half = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    } else {
        const uint32_t odd = magnitude >> 13 & 1u;
        half = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
    }
    return static_cast<pi_half>(sign | half);
}

// One type for each layout: element i of a row as float.
struct F32 {
    static float at(const void *row, int64_t i) { return static_cast<const float *>(row)[i]; }
};

struct F16 {
    static float at(const void *row, int64_t i) {
        return float_of_half(static_cast<const pi_half *>(row)[i]);
    }
};

struct BF16 {
    static float at(const void *row, int64_t i) {
        return float_of_bits(static_cast<uint32_t>(static_cast<const pi_bf16 *>(row)[i]) << 16);
    }
};

int nibble(const uint8_t *qs, int64_t j) {
    return j < PI_QK / 2 ? qs[j] & 15 : qs[j - PI_QK / 2] >> 4;
}

struct Q8_0 {
    using Block = pi_block_q8_0;
    static int quant(const Block &block, int64_t j) { return block.qs[j]; }
    static float scale(const Block &block) { return float_of_half(block.d); }
    static float offset(const Block &) { return 0; }
    static float at(const void *row, int64_t i) {
        const Block &block = static_cast<const Block *>(row)[i / PI_QK];
        return scale(block) * static_cast<float>(quant(block, i % PI_QK));
    }
};

struct Q4_0 {
    using Block = pi_block_q4_0;
    static int quant(const Block &block, int64_t j) { return nibble(block.qs, j) - 8; }
    static float scale(const Block &block) { return float_of_half(block.d); }
    static float offset(const Block &) { return 0; }
    static float at(const void *row, int64_t i) {
        const Block &block = static_cast<const Block *>(row)[i / PI_QK];
        return scale(block) * static_cast<float>(quant(block, i % PI_QK));
    }
};

struct Q4_1 {
    using Block = pi_block_q4_1;
    static int quant(const Block &block, int64_t j) { return nibble(block.qs, j); }
    static float scale(const Block &block) { return float_of_half(block.d); }
    static float offset(const Block &block) { return float_of_half(block.m); }
    static float at(const void *row, int64_t i) {
        const Block &block = static_cast<const Block *>(row)[i / PI_QK];
        return scale(block) * static_cast<float>(quant(block, i % PI_QK)) + offset(block);
    }
};

const char *row_of(const pi_rows *w, int64_t i) {
    return static_cast<const char *>(w->base) + (w->index ? w->index[i] : i) * w->row_bytes;
}

template <typename Type>
void dequantize(const void *row, int64_t begin, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i)
        out[i] = Type::at(row, begin + i);
}

template <typename Type>
void dot_f32(const pi_rows *w, const float *x, float *out) {
    for (int64_t r = 0; r < w->n_rows; ++r) {
        const void *row = row_of(w, r);
        float sum = 0;
        for (int64_t i = 0; i < w->n_cols; ++i)
            sum += Type::at(row, i) * x[i];
        out[r] = sum;
    }
}

template <typename Type>
void dot_q8(const pi_rows *w, const pi_q8_vector *x, float *out) {
    for (int64_t r = 0; r < w->n_rows; ++r) {
        const auto *blocks = reinterpret_cast<const typename Type::Block *>(row_of(w, r));
        float sum = 0;
        for (int64_t b = 0; b < w->n_cols / PI_QK; ++b) {
            int dot = 0;
            for (int64_t j = 0; j < PI_QK; ++j)
                dot += Type::quant(blocks[b], j) * x->q[b * PI_QK + j];
            sum += Type::scale(blocks[b]) * x->d[b] * static_cast<float>(dot) +
                   Type::offset(blocks[b]) * x->s[b];
        }
        out[r] = sum;
    }
}

template <typename Type>
void axpy(const pi_rows *w, const float *coef, int64_t begin, int64_t n, float *y) {
    for (int64_t r = 0; r < w->n_rows; ++r) {
        if (coef[r] == 0)
            continue;
        const void *row = row_of(w, r);
        for (int64_t i = 0; i < n; ++i)
            y[i] += coef[r] * Type::at(row, begin + i);
    }
}

// Through the integer order of the bits, so that a NaN counts as the largest and spreads to the whole block.
float largest_magnitude(const float *x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of_float(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    return float_of_bits(largest);
}

void quantize_q8(const float *x, int64_t n, const pi_q8_vector *out) {
    for (int64_t b = 0; b < n / PI_QK; ++b) {
        const float d = largest_magnitude(x + b * PI_QK, PI_QK) / 127;
        const float inverse = d >= 0x1p-126f && d < INFINITY ? 1 / d : 0; // 1/d of a subnormal may overflow
        int sums[2] = {0, 0};
        for (int64_t j = 0; j < PI_QK; ++j) {
            const float scaled = inverse == 0 ? 0 : x[b * PI_QK + j] * inverse;
            const float rounded = (scaled + 0x1.8p23f) - 0x1.8p23f; // to nearest even
            out->q[b * PI_QK + j] = static_cast<int8_t>(rounded);
            sums[j / (PI_QK / 2)] += out->q[b * PI_QK + j];
        }
        out->d[b] = d;
        out->s[b] = d * static_cast<float>(sums[0] + sums[1]);
        for (int half = 0; half < 2; ++half)
            out->h[2 * b + half] = d * static_cast<float>(sums[half]);
    }
}

void rms_norm(const float *x, const float *gain, int64_t n, float eps, float *out) {
    double squares = 0;
    for (int64_t i = 0; i < n; ++i)
        squares += static_cast<double>(x[i]) * x[i];
    const float scale =
        static_cast<float>(1 / sqrt(squares / static_cast<double>(n) + static_cast<double>(eps)));
    for (int64_t i = 0; i < n; ++i)
        out[i] = x[i] * scale * gain[i];
}

// With e = exp(-|g|) <= 1 nothing overflows on either side of zero.
float silu(float g) {
    const float e = expf(-fabsf(g));
    return g * (g < 0 ? e : 1) / (1 + e);
}

void gated_silu(const float *gate, const float *up, int64_t n, float *out) {
    for (int64_t i = 0; i < n; ++i)
        out[i] = silu(gate[i]) * up[i];
}

int64_t gated_relu(const float *gate, const float *up, int64_t n, float threshold, float *out) {
    int64_t active = 0;
    for (int64_t i = 0; i < n; ++i) {
        const bool above = gate[i] > threshold;
        active += above;
        out[i] = (above ? gate[i] : 0) * up[i];
    }
    return active;
}

void add(const float *x, int64_t n, float *y) {
    for (int64_t i = 0; i < n; ++i)
        y[i] += x[i];
}

void rope(float *x, int64_t n_heads, int64_t head_dim, int64_t n_rot, const float *cosine,
          const float *sine) {
    for (int64_t h = 0; h < n_heads; ++h) {
        float *head = x + h * head_dim;
        for (int64_t i = 0; i < n_rot / 2; ++i) {
            const float a = head[2 * i], b = head[2 * i + 1];
            head[2 * i] = a * cosine[i] - b * sine[i];
            head[2 * i + 1] = a * sine[i] + b * cosine[i];
        }
    }
}

constexpr int64_t panel = 16;

void gemm_tile(const float *w, int64_t row_stride, int64_t k_stride, int64_t n_rows, const float *x,
               int64_t n_k, float *out, int64_t out_stride) {
    for (int64_t r = 0; r < n_rows; ++r) {
        for (int64_t k = 0; k < n_k; ++k) {
            const float weight = w[r * row_stride + k * k_stride];
            for (int64_t t = 0; t < panel; ++t)
                out[r * out_stride + t] += weight * x[k * panel + t];
        }
    }
}

// Position p of the call's pages, if query i sees it.
bool sees(const pi_attend *a, int64_t i, int64_t p) {
    return a->visible[p / PI_PAGE * a->n_q + i] >> (p % PI_PAGE) & 1;
}

// p [n_pages * PI_PAGE] = q . k of the visible positions; returns the largest of them and `peak`.
template <typename Type>
float scores_of(const pi_attend *a, int64_t i, float *p) {
    float peak = a->peak[i];
    for (int64_t position = 0; position < a->n_pages * PI_PAGE; ++position) {
        if (!sees(a, i, position))
            continue;
        const void *k = a->k[position / PI_PAGE];
        float score = 0;
        for (int64_t d = 0; d < a->head_dim; ++d)
            score += a->q[i * a->head_dim + d] * Type::at(k, d * PI_PAGE + position % PI_PAGE);
        p[position] = score;
        peak = score > peak ? score : peak;
    }
    return peak;
}

template <typename Type>
void attend(const pi_attend *a) {
    for (int64_t i = 0; i < a->n_q; ++i) {
        float p[PI_ATTEND_PAGES * PI_PAGE];
        float *out = a->out + i * a->head_dim;
        uint32_t seen = 0;
        for (int64_t page = 0; page < a->n_pages; ++page)
            seen |= a->visible[page * a->n_q + i];
        if (seen == 0)
            continue;
        const float peak = scores_of<Type>(a, i, p);
        const float rescale = expf(a->peak[i] - peak);
        a->peak[i] = peak;
        a->sum[i] *= rescale;
        for (int64_t d = 0; d < a->head_dim; ++d)
            out[d] *= rescale;
        for (int64_t position = 0; position < a->n_pages * PI_PAGE; ++position) {
            if (!sees(a, i, position))
                continue;
            const void *v = a->v[position / PI_PAGE];
            const float weight = expf(p[position] - peak);
            a->sum[i] += weight;
            for (int64_t d = 0; d < a->head_dim; ++d)
                out[d] += weight * Type::at(v, position % PI_PAGE * a->head_dim + d);
        }
    }
}

void to_half(const float *x, int64_t n, pi_half *out) {
    for (int64_t i = 0; i < n; ++i)
        out[i] = half_of_float(x[i]);
}

int usable() {
    return 1;
}

// The vocabulary of simd/unpacked.inl with one lane: a product and a sum are two roundings.
using vfloat = float;
constexpr int64_t lanes = 1;

vfloat vzero() {
    return 0;
}
vfloat vset(float x) {
    return x;
}
vfloat vload(const float *p) {
    return *p;
}
void vstore(float *p, vfloat x) {
    *p = x;
}
vfloat vadd(vfloat a, vfloat b) {
    return a + b;
}
vfloat vfma(vfloat a, vfloat b, vfloat c) {
    return a * b + c;
}
float vsum(vfloat x) {
    return x;
}

} // namespace

#include "simd/unpacked.inl"

namespace {

// The reference for types that are unpacked: their values times d * q.
template <typename Block>
void unpacked_dot_q8(const pi_rows *w, const pi_q8_vector *x, float *out) {
    constexpr int64_t size = block_elements<Block>;
    float values[size];
    for (int64_t r = 0; r < w->n_rows; ++r) {
        const Block *blocks = blocks_of<Block>(w, r);
        float sum = 0;
        for (int64_t i = 0; i < w->n_cols; ++i) {
            if (i % size == 0)
                unpack(blocks[i / size], values);
            sum += values[i % size] * (x->d[i / PI_QK] * static_cast<float>(x->q[i]));
        }
        out[r] = sum;
    }
}

template <typename Block>
constexpr pi_type_kernels int8_type = unpacked_type<Block>(unpacked_dot_q8<Block>);

template <typename Type>
constexpr pi_type_kernels float_type{dequantize<Type>, dot_f32<Type>, nullptr, nullptr, axpy<Type>};
template <typename Type>
constexpr pi_type_kernels block_type{dequantize<Type>, dot_f32<Type>, dot_q8<Type>, nullptr, axpy<Type>};

} // namespace

const pi_kernels pi_kernels_scalar = {
    .name = "scalar",
    .usable = usable,
    .type = {float_type<F32>, float_type<F16>, float_type<BF16>, block_type<Q8_0>, block_type<Q4_0>,
             block_type<Q4_1>, int8_type<pi_block_q5_0>, int8_type<pi_block_q5_1>, int8_type<pi_block_q2_k>,
             int8_type<pi_block_q3_k>, int8_type<pi_block_q4_k>, int8_type<pi_block_q5_k>,
             int8_type<pi_block_q6_k>, int8_type<pi_block_iq4_nl>, int8_type<pi_block_mxfp4>,
             unpacked_type<pi_block_nvfp4>(nullptr)},
    .quantize_q8 = quantize_q8,
    .rms_norm = rms_norm,
    .gated_silu = gated_silu,
    .gated_relu = gated_relu,
    .add = add,
    .rope = rope,
    .gemm_tile = gemm_tile,
    .gemm_panel = panel,
    .round_panel = nullptr,
    .round_weights = nullptr,
    .gemm_rounded = nullptr,
    .attend_f32 = attend<F32>,
    .attend_f16 = attend<F16>,
    .attend_rounded = nullptr,
    .to_half = to_half,
};
