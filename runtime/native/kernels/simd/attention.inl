// attention.inl: one page of keys and values against the queries of a head, softmax kept online (Milakov and
// Gimelshein 2018). Queries go in groups that share the loads of the page; each one's arithmetic is its own.

#pragma once

#include "exp.inl"
#include "floats.inl"

namespace {

constexpr int64_t page_vectors = PI_PAGE / lanes;

// scores[i] = q_i . k, positions along the vector
template <typename Value, int64_t n_q>
inline void page_scores(const pi_attend *a, int64_t first, vfloat scores[n_q][page_vectors]) {
    const float *q = a->q + first * a->head_dim;
    const auto *k = static_cast<const typename Value::Element *>(a->k);
    for (int64_t i = 0; i < n_q; ++i) {
        for (int64_t j = 0; j < page_vectors; ++j)
            scores[i][j] = vzero();
    }
    for (int64_t d = 0; d < a->head_dim; ++d, k += PI_PAGE) {
        vfloat query[n_q];
        for (int64_t i = 0; i < n_q; ++i)
            query[i] = vset(q[i * a->head_dim + d]);
        for (int64_t j = 0; j < page_vectors; ++j) {
            const vfloat key = Value::load(k + j * lanes);
            for (int64_t i = 0; i < n_q; ++i)
                scores[i][j] = vfma(query[i], key, scores[i][j]);
        }
    }
}

// p [PI_PAGE] = exp(score - peak), exactly 0 where not visible; updates the query's peak and sum and returns
// the factor that its earlier output shrinks by. The query sees at least one position.
inline float softmax_step(const pi_attend *a, int64_t i, const vfloat scores[page_vectors], float *p) {
    vfloat visible[page_vectors];
    vfloat largest = vset(-INFINITY);
    for (int64_t j = 0; j < page_vectors; ++j) {
        visible[j] = vchoose(vbits(a->visible[i] >> (j * lanes)), scores[j], vset(-INFINITY));
        largest = vmax(largest, visible[j]);
    }
    const float old_peak = a->peak[i];
    const float page_peak = vmax_lane(largest);
    const float peak = old_peak > page_peak ? old_peak : page_peak;
    vfloat total = vzero();
    for (int64_t j = 0; j < page_vectors; ++j) {
        const vfloat weight = vexp_negative(vsub(visible[j], vset(peak)));
        total = vadd(total, weight);
        vstore(p + j * lanes, weight);
    }
    const float shrink = vfirst_lane(vexp_negative(vset(old_peak - peak)));
    a->peak[i] = peak;
    a->sum[i] = __builtin_fmaf(a->sum[i], shrink, vsum(total));
    return shrink;
}

// out_i[d .. d + n) = shrink_i * out_i + sum over positions of p_i * v, for `vectors` vectors of n elements
// in all
template <typename Value, int64_t n_q, int64_t vectors>
inline void weigh_values(const pi_attend *a, int64_t first, int64_t d, int64_t n, const float p[n_q][PI_PAGE],
                         const float shrink[n_q], uint32_t positions) {
    float *out = a->out + first * a->head_dim + d;
    const auto *v = static_cast<const typename Value::Element *>(a->v) + d;
    const bool whole = n == vectors * lanes;
    vfloat sums[n_q][vectors];
    for (int64_t i = 0; i < n_q; ++i) {
        const float *row = out + i * a->head_dim;
        for (int64_t j = 0; j < vectors; ++j) {
            sums[i][j] = vmul(vset(shrink[i]), whole ? vload(row + j * lanes) : vload_part(row, n));
        }
    }
    for (int64_t position = 0; position < PI_PAGE; ++position, v += a->head_dim) {
        if (!(positions >> position & 1))
            continue;
        for (int64_t j = 0; j < vectors; ++j) {
            const vfloat value = whole ? Value::load(v + j * lanes) : Value::load_part(v, n);
            for (int64_t i = 0; i < n_q; ++i)
                sums[i][j] = vfma(vset(p[i][position]), value, sums[i][j]);
        }
    }
    for (int64_t i = 0; i < n_q; ++i) {
        if (a->visible[first + i] == 0)
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

template <typename Value, int64_t n_q>
void attend_group(const pi_attend *a, int64_t first) {
    uint32_t positions = 0;
    for (int64_t i = 0; i < n_q; ++i)
        positions |= a->visible[first + i];
    if (positions == 0)
        return;
    vfloat scores[n_q][page_vectors];
    page_scores<Value, n_q>(a, first, scores);
    float p[n_q][PI_PAGE] = {}, shrink[n_q];
    for (int64_t i = 0; i < n_q; ++i) {
        shrink[i] = a->visible[first + i] ? softmax_step(a, first + i, scores[i], p[i]) : 1;
    }
    int64_t d = 0;
    for (; d + 4 * lanes <= a->head_dim; d += 4 * lanes) {
        weigh_values<Value, n_q, 4>(a, first, d, 4 * lanes, p, shrink, positions);
    }
    for (; d < a->head_dim; d += lanes) {
        const int64_t left = a->head_dim - d;
        weigh_values<Value, n_q, 1>(a, first, d, left < lanes ? left : lanes, p, shrink, positions);
    }
}

// n_q <= most
template <typename Value, int64_t most>
void attend_rest(const pi_attend *a, int64_t first, int64_t n_q) {
    if (n_q == most) {
        attend_group<Value, most>(a, first);
    } else if constexpr (most > 1) {
        attend_rest<Value, most - 1>(a, first, n_q);
    }
}

template <typename Value>
void attend(const pi_attend *a) {
    int64_t first = 0;
    for (; first + attend_queries <= a->n_q; first += attend_queries) {
        attend_group<Value, attend_queries>(a, first);
    }
    attend_rest<Value, attend_queries - 1>(a, first, a->n_q - first);
}

} // namespace
