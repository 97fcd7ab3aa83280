// attention_rounded.inl: what attention of many queries with queries, keys, weights and values rounded to
// bfloat16 needs besides its products. Pages are rounded once for all queries of a call. There are no scales,
// so a query's arithmetic is its own here too.

#pragma once

#include "attention.inl"
#include "bf16_pairs.inl"

namespace {

constexpr int64_t page_pairs = PI_PAGE / 2;
constexpr int64_t position_pairs = most_positions / 2;
constexpr float log2_e = 1.44269504f;

// What a call rounds, in its room; depth: head_dim rounded up to PI_ATTEND_UNIT, with zeros.
struct RoundedPages {
    int64_t depth;
    uint32_t *q; // [n_q, depth / 2] pairs of neighbours
    uint32_t *k; // [n_pages, depth / 2, PI_PAGE] of two dimensions
    uint32_t *v; // [n_pages, page_pairs, depth] of two positions
};

inline RoundedPages rounded_pages(const pi_attend *a) {
    const int64_t depth = (a->head_dim + PI_ATTEND_UNIT - 1) / PI_ATTEND_UNIT * PI_ATTEND_UNIT;
    auto *room = static_cast<uint32_t *>(a->room);
    uint32_t *k = room + a->n_q * depth / 2;
    return {depth, room, k, k + position_pairs * depth};
}

inline void store_pairs(uint32_t *p, __m512i pairs) {
    _mm512_storeu_si512(p, pairs);
}
inline __m512i load_pairs(const uint32_t *p) {
    return _mm512_loadu_si512(p);
}

void round_queries(const pi_attend *a, const RoundedPages &to) {
    for (int64_t i = 0; i < a->n_q; ++i) {
        const float *q = a->q + i * a->head_dim;
        uint32_t *out = to.q + i * to.depth / 2;
        for (int64_t d = 0; d < to.depth; d += PI_ATTEND_UNIT, out += lanes) {
            alignas(64) float part[PI_ATTEND_UNIT] = {};
            const int64_t n = a->head_dim - d < PI_ATTEND_UNIT ? a->head_dim - d : PI_ATTEND_UNIT;
            __builtin_memcpy(part, q + d, static_cast<size_t>(n) * sizeof *q);
            store_pairs(out, bf16_neighbours(vload(part), vload(part + lanes)));
        }
    }
}

template <typename Value>
void round_keys(const pi_attend *a, int64_t page, const RoundedPages &to) {
    const auto *k = static_cast<const typename Value::Element *>(a->k[page]);
    const auto *ahead = static_cast<const typename Value::Element *>(a->ahead[2 * page]);
    uint32_t *out = to.k + page * to.depth / 2 * PI_PAGE;
    for (int64_t d = 0; d < to.depth; d += 2, k += 2 * PI_PAGE, ahead += 2 * PI_PAGE) {
        if (d < a->head_dim)
            prefetch_bytes_of<2 * PI_PAGE * sizeof *k>(reinterpret_cast<const char *>(ahead));
        for (int64_t j = 0; j < PI_PAGE; j += lanes, out += lanes) {
            const vfloat first = d < a->head_dim ? Value::load(k + j) : vzero();
            const vfloat second = d + 1 < a->head_dim ? Value::load(k + PI_PAGE + j) : vzero();
            store_pairs(out, bf16_pairs(first, second));
        }
    }
}

// n elements, at most a vector.
template <typename Value>
inline vfloat load_some(const typename Value::Element *p, int64_t n) {
    return n == lanes ? Value::load(p) : n == 0 ? vzero() : Value::load_part(p, n);
}

// Values of positions that no query sees may be anything: they become 0. False if others are not finite.
template <typename Value>
bool round_values(const pi_attend *a, int64_t page, const RoundedPages &to) {
    uint32_t seen = 0;
    for (int64_t i = 0; i < a->n_q; ++i)
        seen |= a->visible[page * a->n_q + i];
    const auto *v = static_cast<const typename Value::Element *>(a->v[page]);
    const auto *ahead = static_cast<const typename Value::Element *>(a->ahead[2 * page + 1]);
    uint32_t *out = to.v + page * page_pairs * to.depth;
    vfloat off = vzero(); // of x - x: 0, or NaN
    for (int64_t pair = 0; pair < page_pairs; ++pair, v += 2 * a->head_dim, ahead += 2 * a->head_dim) {
        const bool sees_first = seen >> (2 * pair) & 1, sees_second = seen >> (2 * pair + 1) & 1;
        for (int64_t d = 0; d < to.depth; d += lanes, out += lanes) {
            const int64_t left = a->head_dim - d, n = left < 0 ? 0 : left < lanes ? left : lanes;
            __builtin_prefetch(ahead + d);
            __builtin_prefetch(ahead + a->head_dim + d);
            const vfloat first = sees_first ? load_some<Value>(v + d, n) : vzero();
            const vfloat second = sees_second ? load_some<Value>(v + a->head_dim + d, n) : vzero();
            store_pairs(out, bf16_pairs(first, second));
            off = vadd(off, vadd(vsub(first, first), vsub(second, second)));
        }
    }
    return vsum(off) == 0;
}

// False if a value that is seen is not finite: products of all queries would bring it to those that do not
// see it, as 0 * NaN. The call is not to be computed from rounded pages then.
template <typename Value>
bool round_pages(const pi_attend *a, const RoundedPages &to) {
    round_queries(a, to);
    bool finite = true;
    for (int64_t page = 0; page < a->n_pages; ++page) {
        round_keys<Value>(a, page, to);
        finite = round_values<Value>(a, page, to) && finite;
    }
    return finite;
}

// 2^x, x <= 0, as far off as 1.1e-4 of it: a twentieth of what rounding the weight may cost. The polynomial
// has the least error of those of degree 3 that are 1 at 0. Below 2^-126 exactly 0. NaN stays.
inline vfloat rough_exp2(vfloat x) {
    const vfloat n = vround(x), f = vsub(x, n);
    vfloat p = vfma(f, vset(0.05500906f), vset(0.24221097f));
    p = vfma(p, f, vset(0.69328290f));
    p = vfma(p, f, vset(1));
    return vdrop(vgt(vset(-126), x), vscale_power(p, n));
}

// As softmax_step, with the weights rounded to p [position_pairs], and those summed.
inline float rounded_softmax_step(const pi_attend *a, int64_t i, float *scores, uint32_t *p) {
    const float old_peak = a->peak[i];
    const float new_peak = largest_visible(a, i, scores);
    const float peak = old_peak > new_peak ? old_peak : new_peak;
    const __m512i ones = _mm512_set1_epi32(0x3f803f80);
    vfloat total = vzero();
    for (int64_t at = 0; at < a->n_pages * PI_PAGE; at += PI_PAGE) {
        vfloat weights[page_vectors];
        for (int64_t j = 0; j < page_vectors; ++j)
            weights[j] = rough_exp2(vmul(vsub(vload(scores + at + j * lanes), vset(peak)), vset(log2_e)));
        const __m512i rounded = bf16_neighbours(weights[0], weights[1]);
        store_pairs(p + at / 2, rounded);
        total = add_pair_products(total, rounded, ones);
    }
    const float shrink = vfirst_lane(rough_exp2(vset((old_peak - peak) * log2_e)));
    a->peak[i] = peak;
    a->sum[i] = __builtin_fmaf(a->sum[i], shrink, vsum(total));
    return shrink;
}

// The same for queries that may see nothing: then weights are 0, and earlier output stays.
inline float weights_of_query(const pi_attend *a, int64_t i, float *scores, uint32_t *p) {
    if (!sees_nothing(a, i))
        return rounded_softmax_step(a, i, scores, p);
    __builtin_memset(p, 0, position_pairs * sizeof *p);
    return 1;
}

} // namespace
