// attention_bf16.inl: attention_rounded.inl with products of vectors of pairs, two in every lane.

#pragma once

#include "attention_rounded.inl"

namespace {

// scores[i] [PI_PAGE] = q_i . k of one page
template <int64_t n_q>
inline void rounded_scores(const RoundedPages &of, int64_t first, int64_t page,
                           float (*scores)[most_positions]) {
    const int64_t n_pairs = of.depth / 2;
    const uint32_t *q = of.q + first * n_pairs, *k = of.k + page * n_pairs * PI_PAGE;
    vfloat sums[n_q][page_vectors];
    for (int64_t i = 0; i < n_q; ++i) {
        for (int64_t j = 0; j < page_vectors; ++j)
            sums[i][j] = vzero();
    }
    for (int64_t pair = 0; pair < n_pairs; ++pair, k += PI_PAGE) {
        __m512i query[n_q];
        for (int64_t i = 0; i < n_q; ++i)
            query[i] = _mm512_set1_epi32(static_cast<int32_t>(q[i * n_pairs + pair]));
        for (int64_t j = 0; j < page_vectors; ++j) {
            const __m512i key = load_pairs(k + j * lanes);
            for (int64_t i = 0; i < n_q; ++i)
                sums[i][j] = add_pair_products(sums[i][j], query[i], key);
        }
    }
    for (int64_t i = 0; i < n_q; ++i) {
        for (int64_t j = 0; j < page_vectors; ++j)
            vstore(scores[i] + page * PI_PAGE + j * lanes, sums[i][j]);
    }
}

// out_i[d .. d + n) = shrink_i * out_i + sum over positions of p_i * v
template <int64_t n_q, int64_t vectors>
inline void weigh_rounded(const pi_attend *a, const RoundedPages &of, int64_t first, int64_t d, int64_t n,
                          const uint32_t (*p)[position_pairs], const float shrink[n_q]) {
    float *out = a->out + first * a->head_dim + d;
    const bool whole = n == vectors * lanes;
    vfloat sums[n_q][vectors];
    for (int64_t i = 0; i < n_q; ++i) {
        const float *row = out + i * a->head_dim;
        for (int64_t j = 0; j < vectors; ++j)
            sums[i][j] = vmul(vset(shrink[i]), whole ? vload(row + j * lanes) : vload_part(row, n));
    }
    const uint32_t *v = of.v + d;
    for (int64_t pair = 0; pair < a->n_pages * page_pairs; ++pair, v += of.depth) {
        __m512i weight[n_q];
        for (int64_t i = 0; i < n_q; ++i)
            weight[i] = _mm512_set1_epi32(static_cast<int32_t>(p[i][pair]));
        for (int64_t j = 0; j < vectors; ++j) {
            const __m512i value = load_pairs(v + j * lanes);
            for (int64_t i = 0; i < n_q; ++i)
                sums[i][j] = add_pair_products(sums[i][j], weight[i], value);
        }
    }
    for (int64_t i = 0; i < n_q; ++i) {
        if (sees_nothing(a, first + i))
            continue; // untouched, to the sign of a zero
        float *row = out + i * a->head_dim;
        for (int64_t j = 0; j < vectors; ++j) {
            if (whole) {
                vstore(row + j * lanes, sums[i][j]);
            } else {
                vstore_part(row, n, sums[i][j]);
            }
        }
    }
}

template <int64_t n_q>
inline void weigh_all_rounded(const pi_attend *a, const RoundedPages &of, int64_t first,
                              const uint32_t (*p)[position_pairs], const float shrink[n_q]) {
    int64_t d = 0;
    for (; d + 4 * lanes <= a->head_dim; d += 4 * lanes)
        weigh_rounded<n_q, 4>(a, of, first, d, 4 * lanes, p, shrink);
    for (; d < a->head_dim; d += lanes) {
        const int64_t left = a->head_dim - d;
        weigh_rounded<n_q, 1>(a, of, first, d, left < lanes ? left : lanes, p, shrink);
    }
}

template <int64_t n_q>
void attend_rounded_group(const pi_attend *all, const RoundedPages &of, int64_t first) {
    const pi_attend seen = seen_pages(all, first, n_q), *a = &seen;
    alignas(64) float scores[n_q][most_positions];
    alignas(64) uint32_t p[n_q][position_pairs];
    float shrink[n_q];
    for (int64_t page = 0; page < a->n_pages; ++page)
        rounded_scores<n_q>(of, first, page, scores);
    for (int64_t i = 0; i < n_q; ++i)
        shrink[i] = weights_of_query(a, first + i, scores[i], p[i]);
    constexpr int64_t each = n_q < attend_queries ? n_q : attend_queries, rest = n_q % each;
    for (int64_t i = 0; i + each <= n_q; i += each)
        weigh_all_rounded<each>(a, of, first + i, p + i, shrink + i);
    if constexpr (rest > 0)
        weigh_all_rounded<rest>(a, of, first + n_q - rest, p + n_q - rest, shrink + n_q - rest);
}

// n_q <= most
template <int64_t most>
void attend_rounded_rest(const pi_attend *a, const RoundedPages &of, int64_t first, int64_t n_q) {
    if (n_q == most) {
        attend_rounded_group<most>(a, of, first);
    } else if constexpr (most > 1) {
        attend_rounded_rest<most - 1>(a, of, first, n_q);
    }
}

void attend_rounded(const pi_attend *a) {
    const RoundedPages of = rounded_pages(a);
    if (!round_pages<F16Value>(a, of))
        return attend<F16Value>(a);
    int64_t first = 0;
    for (; first + score_queries <= a->n_q; first += score_queries)
        attend_rounded_group<score_queries>(a, of, first);
    attend_rounded_rest<score_queries - 1>(a, of, first, a->n_q - first);
}

} // namespace
