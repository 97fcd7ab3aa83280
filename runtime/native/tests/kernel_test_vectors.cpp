// kernel_test_vectors.cpp: quantisation of activations, norm, activations, rotation, products of many tokens,
// attention, conversion to half.
#include "kernel_test.h"

#include "pi.h"

#include <algorithm>
#include <limits>

namespace pi::test {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t lengths[] = {1, 5, 8, 31, 64, 576, 1001};

void check(pi_status status) {
    expect(status == PI_OK, pi_last_error());
}

// Every bit is known: products by 1 / d and roundings to whole numbers.
void test_quantize_q8(const pi_kernels &table, const std::string &what) {
    Floats x = normal(8 * PI_QK, 1, 1e-3f);
    x[5] = 2;              // an extreme is hit exactly
    x[PI_QK + 3] = -3;     // and is -127, never -128
    x[2 * PI_QK] = 1e-42f; // tiny beside the others
    std::fill_n(x.begin() + 3 * PI_QK, PI_QK, 0.0f);
    std::fill_n(x.begin() + 4 * PI_QK, PI_QK, 1e-42f);
    x[5 * PI_QK + 1] = infinity;
    x[6 * PI_QK + 31] = nan;
    for (int i = 0; i < PI_QK; ++i) // 0.5, 1.5, ... of a step of 1: ties
        x[size_of(7 * PI_QK + i)] = static_cast<float>(i) == 0 ? 127.0f : static_cast<float>(i) - 16.5f;
    const auto run = [&](const pi_kernels &kernels, Guarded<int8_t> *q) {
        q->resize(x.size());
        Floats scales(x.size() / PI_QK * 4);
        const int64_t n = static_cast<int64_t>(x.size()) / PI_QK;
        const pi_q8_vector out = {q->data(), scales.data(), scales.data() + n, scales.data() + 2 * n};
        kernels.quantize_q8(x.data(), static_cast<int64_t>(x.size()), &out);
        return scales;
    };
    Guarded<int8_t> got, want;
    const Floats got_scales = run(table, &got), want_scales = run(pi_kernels_scalar, &want);
    expect(got == want, what + " quantize_q8");
    expect_equal(got_scales.data(), want_scales.data(), static_cast<int64_t>(want_scales.size()),
                 what + " quantize_q8 scales");
}

// The squares are summed in double: one rounding of the scale, two of the products.
void test_rms_norm(const pi_kernels &table, int64_t n, const std::string &what) {
    const Floats x = normal(n, 1, 3e3f), gain = normal(n, 2);
    double squares = 0;
    for (const float value : x)
        squares += static_cast<double>(value) * value;
    const double scale = 1 / std::sqrt(squares / static_cast<double>(n) + 1e-5);
    Floats got(x.size());
    table.rms_norm(x.data(), gain.data(), n, 1e-5f, got.data());
    Doubles want, bound;
    for (size_t i = 0; i < x.size(); ++i) {
        want.push_back(static_cast<double>(x[i]) * scale * gain[i]);
        bound.push_back(4 * u * std::abs(want.back()));
    }
    expect_within(got, want, bound, what + " rms_norm");
}

// The error of exp and four roundings; where exp(x) would be subnormal it counts as 0.
void expect_silu(const pi_kernels &table, const Floats &gate, const Floats &up, const std::string &what) {
    Floats got(gate.size());
    table.gated_silu(gate.data(), up.data(), static_cast<int64_t>(gate.size()), got.data());
    Doubles want, bound;
    for (size_t i = 0; i < gate.size(); ++i) {
        const double g = gate[i];
        want.push_back(g / (1 + std::exp(-std::max(g, -700.0))) * up[i]);
        bound.push_back((exp_error + 4 * u) * std::abs(want.back()) + 1.1e-36 * std::abs(up[i]));
    }
    expect_within(got, want, bound, what + " gated_silu");
}

void test_silu(const pi_kernels &table, const std::string &what) {
    for (const int64_t n : lengths)
        expect_silu(table, normal(n, 1, 4), normal(n, 2), what);
    Floats wide = {0.0f, -0.0f, -1e38f, 1e38f, -87.3365f, -87.3366f, 1e-45f};
    for (float g = -120; g <= 120; g += 0.01f)
        wide.push_back(g);
    expect_silu(table, wide, Floats(wide.size(), 1), what);
    const Floats special = {nan, infinity, -nan, nan, infinity, nan, 1}, ones(7, 1);
    Floats got(7);
    table.gated_silu(special.data(), ones.data(), 7, got.data());
    for (size_t i = 0; i < 6; ++i)
        expect(std::isnan(special[i]) ? std::isnan(got[i]) : got[i] == infinity, what + " gated_silu of NaN");
}

void test_relu_and_add(const pi_kernels &table, int64_t n, const std::string &what) {
    Floats gate = normal(n, 1), up = normal(n, 2);
    gate[size_of(n / 2)] = 0;
    Floats got(size_of(n)), want(size_of(n));
    for (const float threshold : {0.0f, 0.25f, -100.0f}) {
        const int64_t active = table.gated_relu(gate.data(), up.data(), n, threshold, got.data());
        expect(active == pi_kernels_scalar.gated_relu(gate.data(), up.data(), n, threshold, want.data()),
               what + " gated_relu: active neurons");
        for (size_t i = 0; i < want.size(); ++i)
            expect(got[i] == want[i], what + " gated_relu");
    }
    got = want = up;
    table.add(gate.data(), n, got.data());
    pi_kernels_scalar.add(gate.data(), n, want.data());
    expect_equal(got.data(), want.data(), n, what + " add");
}

// Two products and a sum.
void test_rope(const pi_kernels &table, int64_t head_dim, int64_t n_rot, const std::string &what) {
    const int64_t n_heads = 3;
    const Floats x = normal(n_heads * head_dim, 1), cosine = normal(n_rot / 2, 2),
                 sine = normal(n_rot / 2, 3);
    Floats got = x;
    table.rope(got.data(), n_heads, head_dim, n_rot, cosine.data(), sine.data());
    Doubles want(x.begin(), x.end()), bound(x.size());
    for (int64_t head = 0; head < n_heads; ++head) {
        for (size_t i = 0; i < cosine.size(); ++i) {
            const size_t at = size_of(head * head_dim) + 2 * i;
            const double a = x[at], b = x[at + 1], c = cosine[i], s = sine[i];
            want[at] = a * c - b * s;
            want[at + 1] = a * s + b * c;
            bound[at] = 3 * u * (std::abs(a * c) + std::abs(b * s));
            bound[at + 1] = 3 * u * (std::abs(a * s) + std::abs(b * c));
        }
    }
    expect_within(got, want, bound, what + " rope");
}

// Sums [n_rows, out_stride] that began as `before`, of w [n_rows, n_k] with its strides and the panel x [n_k,
// panel].
struct GemmCase {
    int64_t n_rows, n_k, panel, out_stride, row_stride, k_stride;
    Floats w, x, before;

    GemmCase(const pi_kernels &table, int64_t rows, int64_t depth, bool transposed)
        : n_rows(rows), n_k(depth), panel(table.gemm_panel), out_stride(panel + 3),
          row_stride(transposed ? 1 : n_k), k_stride(transposed ? n_rows : 1), w(normal(n_rows * n_k, 1)),
          x(normal(n_k * panel, 2)), before(normal(n_rows * out_stride, 3)) {}

    // Float32 sums of products of the factors as round(factor); what lies beyond the panel stays.
    template <typename Round>
    void expect(const Floats &got, const Round &round, const std::string &what) const {
        Doubles want(before.begin(), before.end()), bound(before.size());
        for (int64_t r = 0; r < n_rows; ++r) {
            for (int64_t t = 0; t < panel; ++t) {
                const size_t at = size_of(r * out_stride + t);
                double magnitude = std::abs(want[at]);
                for (int64_t k = 0; k < n_k; ++k) {
                    const double term =
                        static_cast<double>(round(w[size_of(r * row_stride + k * k_stride)])) *
                        static_cast<double>(round(x[size_of(k * panel + t)]));
                    want[at] += term;
                    magnitude += std::abs(term);
                }
                bound[at] = static_cast<double>(n_k + 1) * u * magnitude;
            }
        }
        expect_within(got, want, bound, what);
    }
};

void test_gemm(const pi_kernels &table, int64_t n_rows, int64_t n_k, bool transposed,
               const std::string &what) {
    const GemmCase of(table, n_rows, n_k, transposed);
    Floats got = of.before;
    table.gemm_tile(of.w.data(), of.row_stride, of.k_stride, n_rows, of.x.data(), n_k, got.data(),
                    of.out_stride);
    of.expect(got, [](float factor) { return factor; }, what + " gemm_tile");
}

// To the nearest bfloat16, ties to even.
float rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Both factors are rounded to bfloat16. Rows beyond the last stay too.
void test_gemm_rounded(const pi_kernels &table, int64_t n_rows, int64_t n_k, bool transposed,
                       const std::string &what) {
    const GemmCase of(table, n_rows, n_k, transposed);
    const int64_t depth = (n_k + 31) / 32 * 32;
    Guarded<pi_bf16> packed_w(size_of((n_rows + 31) / 32 * 32 * depth)), packed_x(size_of(of.panel * depth));
    table.round_weights(of.w.data(), of.row_stride, of.k_stride, n_rows, n_k, packed_w.data());
    table.round_panel(of.x.data(), n_k, packed_x.data());
    Floats got = of.before;
    table.gemm_rounded(packed_w.data(), n_rows, packed_x.data(), n_k, got.data(), of.out_stride);
    of.expect(got, rounded, what + " gemm_rounded");
}

struct AttentionCase {
    int64_t n_q, n_positions, head_dim;
};

// Output and log-sum-exp of one query in double, and bounds of their errors, first order in u: a score is off
// by (head_dim + 2) u |q| . |k| scale, so its weight by that relatively, besides the error of exp, and the
// sums over positions and pages by their length.
struct AttentionReference {
    Doubles out, out_bound;
    double lse, lse_bound;
};

// weight_error: what else a weight may be off by, relatively.
AttentionReference attention_reference(const float *q, const Floats &k, const Floats &v, int64_t n_seen,
                                       const AttentionCase &shape, double scale, double weight_error) {
    const size_t dim = size_of(shape.head_dim), n = size_of(n_seen);
    Doubles scores(n), relative(n);
    for (size_t p = 0; p < n; ++p) {
        for (size_t d = 0; d < dim; ++d) {
            const double term = static_cast<double>(q[d]) * k[p * dim + d] * scale;
            scores[p] += term;
            relative[p] += static_cast<double>(dim + 2) * u * std::abs(term);
        }
    }
    const double peak = *std::max_element(scores.begin(), scores.end());
    const double n_pages = static_cast<double>(shape.n_positions / PI_PAGE + 1);
    AttentionReference want{Doubles(dim), Doubles(dim), 0, 0};
    double total = 0, worst = 0;
    for (size_t p = 0; p < n; ++p)
        total += std::exp(scores[p] - peak);
    for (size_t p = 0; p < n; ++p) {
        relative[p] += weight_error + u * (peak - scores[p]) + (1 + n_pages) * (exp_error + u) +
                       static_cast<double>(shape.n_positions) * u;
        worst += std::exp(scores[p] - peak) / total * relative[p];
    }
    for (size_t p = 0; p < n; ++p) {
        const double weight = std::exp(scores[p] - peak) / total;
        for (size_t d = 0; d < dim; ++d) {
            want.out[d] += weight * v[p * dim + d];
            want.out_bound[d] += weight * (relative[p] + worst) * std::abs(v[p * dim + d]);
        }
    }
    want.lse = peak + std::log(total);
    want.lse_bound = worst + 4 * u * (1 + std::abs(want.lse));
    return want;
}

void expect_attention(const pi_kernels &table, uint32_t kv_type, const AttentionCase &shape, const Floats &q,
                      const Floats &k, const Floats &v, float scale, const std::string &what) {
    // bfloat16: a weight is rounded by 2^-9 at most, after an exp that is off by 1.1e-4.
    const double weight_error = kv_type == PI_TYPE_BF16 ? 1.0 / 512 + 1.1e-4 : 0;
    Floats got(q.size()), lse(size_of(shape.n_q));
    check(pi_kernel_attention(table.name, kv_type, q.data(), shape.n_q, k.data(), v.data(), shape.n_positions,
                              shape.head_dim, scale, got.data(), lse.data()));
    for (int64_t i = 0; i < shape.n_q; ++i) {
        const size_t at = size_of(i * shape.head_dim);
        const int64_t n_seen = shape.n_positions - shape.n_q + i + 1;
        const AttentionReference want =
            attention_reference(&q[at], k, v, n_seen, shape, static_cast<double>(scale), weight_error);
        const auto row = got.begin() + static_cast<int64_t>(at);
        expect_within({row, row + shape.head_dim}, want.out, want.out_bound, what);
        expect_within({lse[size_of(i)]}, {want.lse}, {want.lse_bound}, what + " lse");
    }
}

// The entry point fills unused positions with NaN: a kernel must not let them through.
void test_attention(const pi_kernels &table, const AttentionCase &shape, const std::string &what) {
    Floats q = normal(shape.n_q * shape.head_dim, 1, 2);
    Floats k = normal(shape.n_positions * shape.head_dim, 2, 2),
           v = normal(shape.n_positions * shape.head_dim, 3, 2);
    const float scale = 1 / std::sqrt(static_cast<float>(shape.head_dim));
    expect_attention(table, PI_TYPE_F32, shape, q, k, v, scale, what + " attend f32");
    for (Floats *cached : {&k, &v}) {
        Guarded<pi_half> halves(cached->size());
        const auto n = static_cast<int64_t>(halves.size());
        pi_kernels_scalar.to_half(cached->data(), n, halves.data());
        pi_kernels_scalar.type[PI_KT_F16].dequantize(halves.data(), 0, n, cached->data());
    }
    expect_attention(table, PI_TYPE_F16, shape, q, k, v, scale, what + " attend f16");
    if (table.attend_rounded == nullptr)
        return;
    for (Floats *factors : {&q, &k, &v})
        std::transform(factors->begin(), factors->end(), factors->begin(), rounded);
    // A scale that keeps queries as they are.
    expect_attention(table, PI_TYPE_BF16, shape, q, k, v, 0.125f, what + " attend rounded");
}

// Every half, what lies half way to its neighbour, a little beyond that, and what no half is near to.
void test_to_half(const pi_kernels &table, const std::string &what) {
    Guarded<pi_half> halves(1 << 16);
    for (size_t i = 0; i < halves.size(); ++i)
        halves[i] = static_cast<pi_half>(i);
    const auto n = static_cast<int64_t>(halves.size());
    Floats x(halves.size());
    table.type[PI_KT_F16].dequantize(halves.data(), 0, n, x.data());
    for (size_t i = 0; i + 1 < halves.size(); ++i) {
        const float tie = (x[i] + x[i + 1]) / 2;
        x.insert(x.end(), {tie, std::nextafter(tie, infinity)});
    }
    x.insert(x.end(), {65519.9f, 65520.0f, 1e9f, -1e9f, 2.9e-8f, 2.99e-8f, 1e-45f, -0.0f, -infinity});
    Guarded<pi_half> got(x.size()), want(x.size());
    table.to_half(x.data(), static_cast<int64_t>(x.size()), got.data());
    pi_kernels_scalar.to_half(x.data(), static_cast<int64_t>(x.size()), want.data());
    for (size_t i = 0; i < x.size(); ++i) {
        const bool is_nan = (got[i] & 0x7fff) > 0x7c00;
        expect(std::isnan(x[i]) ? is_nan : got[i] == want[i], what + " to_half of " + std::to_string(x[i]));
    }
}

} // namespace

void test_vectors(const pi_kernels &table) {
    const std::string what = table.name;
    test_quantize_q8(table, what);
    for (const int64_t n : lengths) {
        test_rms_norm(table, n, what);
        test_relu_and_add(table, n, what);
    }
    test_silu(table, what);
    test_rope(table, 64, 64, what);
    test_rope(table, 11, 10, what);
    for (const bool transposed : {false, true}) {
        for (const int64_t n_rows : {1, 5, 12, 13, 37})
            test_gemm(table, n_rows, 2 * n_rows + 1, transposed, what);
        for (int64_t n_rows : {1, 31, 32, 75, 96}) {
            if (table.gemm_rounded != nullptr)
                test_gemm_rounded(table, n_rows, 3 * n_rows, transposed, what);
        }
    }
    const AttentionCase cases[] = {{1, 1, 64},   {1, 32, 64},    {3, 33, 64},  {4, 64, 128},
                                   {7, 7, 2},    {9, 70, 66},    {2, 65, 33},  {17, 130, 80},
                                   {16, 33, 64}, {19, 300, 128}, {40, 97, 64}, {130, 140, 64}};
    for (const AttentionCase &shape : cases)
        test_attention(table, shape, what);
    test_to_half(table, what);
}

} // namespace pi::test
