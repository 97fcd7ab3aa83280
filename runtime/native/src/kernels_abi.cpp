// kernels_abi.cpp: the pi_kernel_* functions, one call a kernel, for parity tests and the kernel lab. They
// pack and unpack as the engine does; speed does not matter here beyond the kernel itself.
#include "isa.h"
#include "pi.h"
#include "status.h"
#include "types.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace pi {
namespace {

void require_range(bool holds, const char *what) {
    if (!holds)
        throw_usage(what);
}

void require_whole_blocks(const TypeInfo &type, int64_t n, const char *what) {
    if (n < 0 || n % type.block_elements != 0) {
        throw_usage(std::string(what) + " must be a multiple of " + std::to_string(type.block_elements) +
                    " for " + type.name);
    }
}

pi_rows rows_of(const TypeInfo &type, const void *matrix, const int32_t *index, int64_t n_rows,
                int64_t n_cols) {
    require_range(n_rows >= 0, "n_rows is negative");
    require_whole_blocks(type, n_cols, "n_cols");
    const auto row_bytes = static_cast<int64_t>(type.row_bytes(static_cast<uint64_t>(n_cols)));
    return {
        &require(static_cast<const char *>(matrix), "matrix"), row_bytes, n_cols, index, n_rows, nullptr, 0};
}

// Owns what a pi_q8_vector points to.
struct QuantisedVector {
    QuantisedVector(const pi_kernels &kernels, const float *x, int64_t n)
        : q(static_cast<size_t>(n)), d(static_cast<size_t>(n / PI_QK)), s(d.size()), h(2 * d.size()) {
        const pi_q8_vector out = view();
        kernels.quantize_q8(x, n, &out);
    }
    pi_q8_vector view() { return {q.data(), d.data(), s.data(), h.data()}; }

    std::vector<int8_t> q;
    std::vector<float> d, s, h;
};

void dot_rows(const pi_kernels &kernels, const TypeInfo &type, uint32_t activation_type, const pi_rows &w,
              const float *x, float *out) {
    const pi_type_kernels &of_type = kernels.type[type.kernel_index];
    if (activation_type == PI_TYPE_F32) {
        of_type.dot_f32(&w, x, out);
        return;
    }
    require_range(activation_type == PI_TYPE_Q8_0 && type.int8_activations,
                  "activation_type must be F32, or Q8_0 against a type that takes int8 activations");
    QuantisedVector quantised(kernels, x, w.n_cols);
    const pi_q8_vector view = quantised.view();
    of_type.dot_q8(&w, &view, out);
}

void multiply_rows(const pi_kernels &kernels, const TypeInfo &type, const pi_rows &w, const float *x,
                   int64_t n_tokens, float *out) {
    const pi_type_kernels &of_type = kernels.type[type.kernel_index];
    if (of_type.many_q8 == nullptr)
        throw_usage(std::string(kernels.name) + " has no product of many tokens for " + type.name);
    QuantisedVector quantised(kernels, x, n_tokens * w.n_cols);
    const pi_q8_vector view = quantised.view();
    of_type.many_q8(&w, &view, n_tokens, out, w.n_rows);
}

// panel [n_k, width]: tokens first .. first + width of x [n_tokens, n_k], zeros beyond the last
std::vector<float> pack_panel(const float *x, int64_t n_tokens, int64_t n_k, int64_t first, int64_t width) {
    std::vector<float> panel(static_cast<size_t>(n_k * width));
    const int64_t n = std::min(width, n_tokens - first);
    for (int64_t k = 0; k < n_k; ++k) {
        for (int64_t t = 0; t < n; ++t)
            panel[static_cast<size_t>(k * width + t)] = x[(first + t) * n_k + k];
    }
    return panel;
}

struct Gemm {
    const float *w;
    int64_t row_stride, k_stride, n_rows, n_k;
};

void gemm(const pi_kernels &kernels, const Gemm &g, const float *x, int64_t n_tokens, float *out) {
    const int64_t width = kernels.gemm_panel;
    for (int64_t first = 0; first < n_tokens; first += width) {
        const std::vector<float> panel = pack_panel(x, n_tokens, g.n_k, first, width);
        std::vector<float> tile(static_cast<size_t>(g.n_rows * width));
        kernels.gemm_tile(g.w, g.row_stride, g.k_stride, g.n_rows, panel.data(), g.n_k, tile.data(), width);
        for (int64_t t = 0; t < std::min(width, n_tokens - first); ++t) {
            for (int64_t r = 0; r < g.n_rows; ++r) {
                out[(first + t) * g.n_rows + r] = tile[static_cast<size_t>(r * width + t)];
            }
        }
    }
}

// One page of keys [head_dim, PI_PAGE] and values [PI_PAGE, head_dim], as float and as the type of the cache.
struct Page {
    std::vector<float> keys, values;
    std::vector<pi_half> half_keys, half_values;
};

// Unused positions are NaN: a kernel must not look at what no query sees.
Page build_page(const pi_kernels &kernels, const float *k, const float *v, int64_t n, int64_t head_dim,
                bool half) {
    const auto size = static_cast<size_t>(head_dim * PI_PAGE);
    const float unused = std::numeric_limits<float>::quiet_NaN();
    Page page{std::vector<float>(size, unused), std::vector<float>(size, unused), {}, {}};
    for (int64_t p = 0; p < n; ++p) {
        for (int64_t d = 0; d < head_dim; ++d) {
            page.keys[static_cast<size_t>(d * PI_PAGE + p)] = k[p * head_dim + d];
            page.values[static_cast<size_t>(p * head_dim + d)] = v[p * head_dim + d];
        }
    }
    if (half) {
        page.half_keys.resize(size);
        page.half_values.resize(size);
        kernels.to_half(page.keys.data(), static_cast<int64_t>(size), page.half_keys.data());
        kernels.to_half(page.values.data(), static_cast<int64_t>(size), page.half_values.data());
    }
    return page;
}

// Bit p of element i: query i sees position first + p, which is at most n_positions - n_q + i.
std::vector<uint32_t> visible_positions(int64_t n_q, int64_t n_positions, int64_t first) {
    std::vector<uint32_t> visible(static_cast<size_t>(n_q));
    for (int64_t i = 0; i < n_q; ++i) {
        const int64_t n = std::clamp<int64_t>(n_positions - n_q + i + 1 - first, 0, PI_PAGE);
        visible[static_cast<size_t>(i)] = static_cast<uint32_t>((uint64_t{1} << n) - 1);
    }
    return visible;
}

struct Attention {
    const float *k, *v; // [n_positions, head_dim]
    int64_t n_q, n_positions, head_dim;
    uint32_t kv_type;
    bool half() const { return kv_type != PI_TYPE_F32; }
};

// kv_type BF16: of a cache of halves, factors rounded to bfloat16.
auto attend_kernel(const pi_kernels &kernels, uint32_t kv_type) {
    if (kv_type == PI_TYPE_BF16 && kernels.attend_rounded == nullptr)
        throw_usage(std::string(kernels.name) + " has no attention in bfloat16");
    return kv_type == PI_TYPE_BF16  ? kernels.attend_rounded
           : kv_type == PI_TYPE_F16 ? kernels.attend_f16
                                    : kernels.attend_f32;
}

// Leaves the unnormalised output in a.out, and peak and sum beside it.
void attend_pages(const pi_kernels &kernels, const Attention &attention, pi_attend a) {
    constexpr int64_t most = PI_ATTEND_PAGES * PI_PAGE;
    for (int64_t first = 0; first < attention.n_positions; first += most) {
        std::vector<Page> pages;
        std::vector<uint32_t> visible;
        const int64_t end = std::min(first + most, attention.n_positions);
        for (int64_t begin = first; begin < end; begin += PI_PAGE) {
            const int64_t offset = begin * attention.head_dim;
            const int64_t n = std::min<int64_t>(PI_PAGE, end - begin);
            pages.push_back(build_page(kernels, attention.k + offset, attention.v + offset, n,
                                       attention.head_dim, attention.half()));
            const std::vector<uint32_t> seen = visible_positions(attention.n_q, attention.n_positions, begin);
            visible.insert(visible.end(), seen.begin(), seen.end());
        }
        for (size_t i = 0; i < PI_ATTEND_PAGES; ++i) {
            const Page &page = pages[std::min(i, pages.size() - 1)];
            a.k[i] = attention.half() ? static_cast<const void *>(page.half_keys.data()) : page.keys.data();
            a.v[i] =
                attention.half() ? static_cast<const void *>(page.half_values.data()) : page.values.data();
            a.ahead[2 * i] = a.k[i];
            a.ahead[2 * i + 1] = a.v[i];
        }
        a.n_pages = static_cast<int64_t>(pages.size());
        a.visible = visible.data();
        attend_kernel(kernels, attention.kv_type)(&a);
    }
}

void attend(const pi_kernels &kernels, const Attention &attention, const float *q, float scale, float *out,
            float *lse) {
    const auto n_q = static_cast<size_t>(attention.n_q);
    const auto head_dim = static_cast<size_t>(attention.head_dim);
    std::vector<float> scaled(q, q + n_q * head_dim);
    for (float &value : scaled)
        value *= scale;
    std::vector<float> peak(n_q, -std::numeric_limits<float>::infinity()), sum(n_q);
    std::fill_n(out, n_q * head_dim, 0.0f);
    pi_attend work{};
    work.q = scaled.data();
    work.out = out;
    work.peak = peak.data();
    work.sum = sum.data();
    work.n_q = attention.n_q;
    work.head_dim = attention.head_dim;
    std::vector<uint8_t> room(static_cast<size_t>(PI_ATTEND_ROOM(attention.n_q, attention.head_dim)));
    work.room = room.data();
    attend_pages(kernels, attention, work);
    for (size_t i = 0; i < n_q; ++i) {
        for (size_t d = 0; d < head_dim; ++d)
            out[i * head_dim + d] /= sum[i];
        lse[i] = peak[i] + std::log(sum[i]);
    }
}

} // namespace
} // namespace pi

pi_status pi_type_layout(uint32_t type, uint32_t *block_elements, uint32_t *block_bytes) {
    return pi::guarded([&] {
        const pi::TypeInfo &info = pi::type_info(type);
        pi::require(block_elements, "block_elements") = info.block_elements;
        pi::require(block_bytes, "block_bytes") = info.block_bytes;
    });
}

pi_status pi_kernel_dequantize(const char *isa, uint32_t type, const void *row, int64_t begin, int64_t n,
                               float *out) {
    return pi::guarded([&] {
        const pi::TypeInfo &info = pi::type_info(type);
        pi::require_whole_blocks(info, begin, "begin");
        pi::require_range(n >= 0, "n is negative");
        pi::require(static_cast<const char *>(row), "row");
        pi::require(out, "out");
        pi::select_kernels(isa).type[info.kernel_index].dequantize(row, begin, n, out);
    });
}

pi_status pi_kernel_dot_rows(const char *isa, uint32_t type, uint32_t activation_type, const void *matrix,
                             const int32_t *index, int64_t n_rows, int64_t n_cols, const float *x,
                             float *out) {
    return pi::guarded([&] {
        const pi::TypeInfo &info = pi::type_info(type);
        const pi_rows rows = pi::rows_of(info, matrix, index, n_rows, n_cols);
        pi::require(x, "x");
        pi::require(out, "out");
        pi::dot_rows(pi::select_kernels(isa), info, activation_type, rows, x, out);
    });
}

pi_status pi_kernel_multiply_rows(const char *isa, uint32_t type, const void *matrix, int64_t n_rows,
                                  int64_t n_cols, const float *x, int64_t n_tokens, float *out) {
    return pi::guarded([&] {
        const pi::TypeInfo &info = pi::type_info(type);
        pi::require_range(n_tokens >= 0, "n_tokens is negative");
        const pi_rows rows = pi::rows_of(info, matrix, nullptr, n_rows, n_cols);
        pi::multiply_rows(pi::select_kernels(isa), info, rows, &pi::require(x, "x"), n_tokens,
                          &pi::require(out, "out"));
    });
}

pi_status pi_kernel_axpy_rows(const char *isa, uint32_t type, const void *matrix, const int32_t *index,
                              int64_t n_rows, int64_t n_cols, const float *coef, int64_t begin, int64_t n,
                              float *out) {
    return pi::guarded([&] {
        const pi::TypeInfo &info = pi::type_info(type);
        const pi_rows rows = pi::rows_of(info, matrix, index, n_rows, n_cols);
        pi::require_range(begin >= 0 && begin % PI_QK == 0, "begin must be a multiple of 32");
        pi::require_range(n >= 0 && begin + n <= n_cols, "columns [begin, begin + n) lie outside the row");
        pi::require_whole_blocks(info, n, "n");
        pi::require(coef, "coef");
        pi::require(out, "out");
        pi::select_kernels(isa).type[info.kernel_index].axpy(&rows, coef, begin, n, out);
    });
}

pi_status pi_kernel_rms_norm(const char *isa, const float *x, const float *gain, int64_t n, float eps,
                             float *out) {
    return pi::guarded([&] {
        pi::require_range(n > 0, "n must be positive");
        pi::select_kernels(isa).rms_norm(&pi::require(x, "x"), &pi::require(gain, "gain"), n, eps,
                                         &pi::require(out, "out"));
    });
}

pi_status pi_kernel_gated(const char *isa, uint32_t activation, float threshold, const float *gate,
                          const float *up, int64_t n, float *out) {
    return pi::guarded([&] {
        pi::require_range(n >= 0, "n is negative");
        const pi_kernels &kernels = pi::select_kernels(isa);
        pi::require(gate, "gate");
        pi::require(up, "up");
        pi::require(out, "out");
        if (activation == PI_ACTIVATION_SILU) {
            kernels.gated_silu(gate, up, n, out);
        } else {
            pi::require_range(activation == PI_ACTIVATION_RELU, "activation is unknown");
            kernels.gated_relu(gate, up, n, threshold, out);
        }
    });
}

pi_status pi_kernel_gemm(const char *isa, const float *w, uint32_t transposed, int64_t n_rows, int64_t n_k,
                         const float *x, int64_t n_tokens, float *out) {
    return pi::guarded([&] {
        pi::require_range(n_rows >= 0 && n_k >= 0 && n_tokens >= 0, "a dimension is negative");
        const pi::Gemm shape{&pi::require(w, "w"), transposed ? 1 : n_k, transposed ? n_rows : 1, n_rows,
                             n_k};
        pi::gemm(pi::select_kernels(isa), shape, &pi::require(x, "x"), n_tokens, &pi::require(out, "out"));
    });
}

pi_status pi_kernel_attention(const char *isa, uint32_t kv_type, const float *q, int64_t n_q, const float *k,
                              const float *v, int64_t n_positions, int64_t head_dim, float scale, float *out,
                              float *lse) {
    return pi::guarded([&] {
        pi::require_range(kv_type == PI_TYPE_F32 || kv_type == PI_TYPE_F16 || kv_type == PI_TYPE_BF16,
                          "kv_type must be F32, F16 or BF16");
        pi::require_range(head_dim > 0, "head_dim must be positive");
        pi::require_range(n_q >= 0 && n_positions >= n_q,
                          "there must be at least as many positions as queries");
        pi::require(q, "q");
        const pi::Attention shape{
            &pi::require(k, "k"), &pi::require(v, "v"), n_q, n_positions, head_dim, kv_type};
        pi::attend(pi::select_kernels(isa), shape, q, scale, &pi::require(out, "out"),
                   &pi::require(lse, "lse"));
    });
}
