// vector.inl: operations on activation vectors of any length.

#pragma once

#include "exp.inl"
#include "floats.inl"

namespace {

// out[0, n) = f(a, b); a short last vector is computed on whole lanes, so that position does not change bits.
template <typename Function>
inline void map_two(const float *a, const float *b, int64_t n, float *out, Function f) {
    for (; n >= lanes; n -= lanes, a += lanes, b += lanes, out += lanes)
        vstore(out, f(vload(a), vload(b)));
    if (n > 0)
        vstore_part(out, n, f(vload_part(a, n), vload_part(b, n)));
}

void add(const float *x, int64_t n, float *y) {
    map_two(x, y, n, y, [](vfloat a, vfloat b) { return vadd(a, b); });
}

// With e = exp(-|g|) <= 1 nothing overflows on either side of zero.
inline vfloat vsilu(vfloat g) {
    const vfloat e = vexp_negative(vneg_abs(g));
    const vfloat numerator = vchoose(vgt(vzero(), g), e, vset(1));
    return vmul(g, vdiv(numerator, vadd(e, vset(1))));
}

void gated_silu(const float *gate, const float *up, int64_t n, float *out) {
    map_two(gate, up, n, out, [](vfloat g, vfloat u) { return vmul(vsilu(g), u); });
}

int64_t gated_relu(const float *gate, const float *up, int64_t n, float threshold, float *out) {
    int64_t active = 0;
    const vfloat limit = vset(threshold);
    for (; n >= lanes; n -= lanes, gate += lanes, up += lanes, out += lanes) {
        const vfloat g = vload(gate);
        const vmask above = vgt(g, limit);
        active += vcount(above);
        vstore(out, vmul(vkeep(above, g), vload(up)));
    }
    if (n > 0) {
        const vfloat g = vload_part(gate, n);
        const vmask above = vfirst(n, vgt(g, limit));
        active += vcount(above);
        vstore_part(out, n, vmul(vkeep(above, g), vload_part(up, n)));
    }
    return active;
}

// The squares are summed in double: no rounding worth mentioning up to any width of a model.
void rms_norm(const float *x, const float *gain, int64_t n, float eps, float *out) {
    vdouble squares = vdouble_zero();
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes)
        squares = vadd_squares(vload(x + i), squares);
    if (i < n)
        squares = vadd_squares(vload_part(x + i, n - i), squares);
    const double mean = vdouble_sum(squares) / static_cast<double>(n);
    const vfloat scale = vset(static_cast<float>(1 / sqrt(mean + static_cast<double>(eps))));
    map_two(x, gain, n, out, [=](vfloat a, vfloat g) { return vmul(vmul(a, scale), g); });
}

// Whole vectors of pairs, then pair by pair with the same two roundings.
void rope(float *x, int64_t n_heads, int64_t head_dim, int64_t n_rot, const float *cosine,
          const float *sine) {
    constexpr int64_t pairs = lanes / 2;
    const int64_t n_pairs = n_rot / 2;
    for (int64_t h = 0; h < n_heads; ++h, x += head_dim) {
        int64_t i = 0;
        for (; i + pairs <= n_pairs; i += pairs) {
            vstore(x + 2 * i, vrotate(vload(x + 2 * i), vtwice(cosine + i), vtwice(sine + i)));
        }
        for (; i < n_pairs; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = __builtin_fmaf(a, cosine[i], -(b * sine[i]));
            x[2 * i + 1] = __builtin_fmaf(b, cosine[i], a * sine[i]);
        }
    }
}

void to_half(const float *x, int64_t n, pi_half *out) {
    for (; n >= lanes; n -= lanes, x += lanes, out += lanes)
        vstore_half(out, vload(x));
    if (n <= 0)
        return;
    pi_half last[lanes];
    vstore_half(last, vload_part(x, n));
    for (int64_t i = 0; i < n; ++i)
        out[i] = last[i];
}

void quantize_q8(const float *x, int64_t n, const pi_q8_vector *out) {
    for (int64_t b = 0; b < n / PI_QK; ++b) {
        vfloat values[block_vectors];
        F32::unpack(x + b * PI_QK, values);
        const float d = vlargest_magnitude(values) / 127;
        const bool normal = d >= 0x1p-126f && d < INFINITY; // 1/d of a subnormal may overflow
        for (int64_t j = 0; j < block_vectors && !normal; ++j)
            values[j] = vzero();
        int32_t sums[2];
        vstore_i8(values, normal ? 1 / d : 0, out->q + b * PI_QK, sums);
        out->d[b] = d;
        out->s[b] = d * static_cast<float>(sums[0] + sums[1]);
        out->h[2 * b] = d * static_cast<float>(sums[0]);
        out->h[2 * b + 1] = d * static_cast<float>(sums[1]);
    }
}

} // namespace
