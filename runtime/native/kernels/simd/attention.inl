// attention.inl: some pages of keys and values against the queries of a head, softmax kept online (Milakov
// and Gimelshein 2018). Queries go in groups that share the loads of a page; each one's arithmetic is its
// own.

#pragma once

#include "exp.inl"
#include "floats.inl"
#include "prefetch.inl"

namespace {

constexpr int64_t page_vectors = PI_PAGE / lanes;
constexpr int64_t most_positions = PI_ATTEND_PAGES * PI_PAGE;

// What to fetch while `part` of the call's keys and values, `used`, is gone through; the first group of
// queries does it for all.
inline const char *part_ahead(const pi_attend *a, int64_t first, int64_t part, const void *used) {
    return static_cast<const char *>(first == 0 ? a->ahead[part] : used);
}

template <int64_t n_bytes>
[[gnu::always_inline]] inline void prefetch_bytes_of(const char *p) {
    for (int64_t offset = 0; offset < n_bytes; offset += cache_line)
        __builtin_prefetch(p + offset);
}

// scores[i] [PI_PAGE] = q_i . k of one page, positions along the vector
template <typename Value, int64_t n_q>
inline void page_scores(const pi_attend *a, int64_t first, int64_t page, float (*scores)[most_positions]) {
    const float *q = a->q + first * a->head_dim;
    const auto *k = static_cast<const typename Value::Element *>(a->k[page]);
    const char *ahead = part_ahead(a, first, page, k);
    vfloat sums[n_q][page_vectors];
    for (int64_t i = 0; i < n_q; ++i) {
        for (int64_t j = 0; j < page_vectors; ++j)
            sums[i][j] = vzero();
    }
    for (int64_t d = 0; d < a->head_dim; ++d, k += PI_PAGE) {
        prefetch_bytes_of<PI_PAGE * sizeof *k>(ahead + d * PI_PAGE * static_cast<int64_t>(sizeof *k));
        vfloat query[n_q];
        for (int64_t i = 0; i < n_q; ++i)
            query[i] = vset(q[i * a->head_dim + d]);
        for (int64_t j = 0; j < page_vectors; ++j) {
            const vfloat key = Value::load(k + j * lanes);
            for (int64_t i = 0; i < n_q; ++i)
                sums[i][j] = vfma(query[i], key, sums[i][j]);
        }
    }
    for (int64_t i = 0; i < n_q; ++i) {
        for (int64_t j = 0; j < page_vectors; ++j)
            vstore(scores[i] + page * PI_PAGE + j * lanes, sums[i][j]);
    }
}

// The largest of a query's scores [n_pages, PI_PAGE], which become -inf where they are not visible.
inline float largest_visible(const pi_attend *a, int64_t i, float *scores) {
    vfloat largest = vset(-INFINITY);
    for (int64_t page = 0; page < a->n_pages; ++page) {
        const uint32_t visible = a->visible[page * a->n_q + i];
        for (int64_t j = 0; j < page_vectors; ++j) {
            float *at = scores + page * PI_PAGE + j * lanes;
            if (visible == UINT32_MAX) { // as nearly all pages are
                largest = vmax(largest, vload(at));
                continue;
            }
            const vfloat score = vchoose(vbits(visible >> (j * lanes)), vload(at), vset(-INFINITY));
            largest = vmax(largest, score);
            vstore(at, score);
        }
    }
    return vmax_lane(largest);
}

// p [n_pages, PI_PAGE]: scores become exp(score - peak), exactly 0 where not visible; updates the query's
// peak and sum and returns the factor that its earlier output shrinks by.
inline float softmax_step(const pi_attend *a, int64_t i, float *p) {
    const float old_peak = a->peak[i];
    const float new_peak = largest_visible(a, i, p);
    const float peak = old_peak > new_peak ? old_peak : new_peak;
    vfloat total = vzero();
    for (int64_t at = 0; at < a->n_pages * PI_PAGE; at += lanes) {
        const vfloat weight = vexp_negative(vsub(vload(p + at), vset(peak)));
        total = vadd(total, weight);
        vstore(p + at, weight);
    }
    const float shrink = vfirst_lane(vexp_negative(vset(old_peak - peak)));
    a->peak[i] = peak;
    a->sum[i] = __builtin_fmaf(a->sum[i], shrink, vsum(total));
    return shrink;
}

inline bool sees_nothing(const pi_attend *a, int64_t i) {
    uint32_t positions = 0;
    for (int64_t page = 0; page < a->n_pages; ++page)
        positions |= a->visible[page * a->n_q + i];
    return positions == 0;
}

// a without the last pages if none of n_q queries sees them.
inline pi_attend seen_pages(const pi_attend *a, int64_t first, int64_t n_q) {
    pi_attend seen = *a;
    for (; seen.n_pages > 0; --seen.n_pages) {
        const uint32_t *visible = a->visible + (seen.n_pages - 1) * a->n_q + first;
        for (int64_t i = 0; i < n_q; ++i) {
            if (visible[i] != 0)
                return seen;
        }
    }
    return seen;
}

// out_i[d .. d + n) = shrink_i * out_i + sum over positions of p_i * v, for `vectors` vectors of n elements
// in all; positions [n_pages]: those that some query of the group sees
template <typename Value, int64_t n_q, int64_t vectors>
inline void weigh_values(const pi_attend *a, int64_t first, int64_t d, int64_t n,
                         const float (*p)[most_positions], const float shrink[n_q],
                         const uint32_t *positions) {
    float *out = a->out + first * a->head_dim + d;
    const bool whole = n == vectors * lanes;
    constexpr int64_t element_bytes = sizeof(typename Value::Element);
    vfloat sums[n_q][vectors];
    for (int64_t i = 0; i < n_q; ++i) {
        const float *row = out + i * a->head_dim;
        for (int64_t j = 0; j < vectors; ++j) {
            sums[i][j] = vmul(vset(shrink[i]), whole ? vload(row + j * lanes) : vload_part(row, n));
        }
    }
    for (int64_t page = 0; page < a->n_pages; ++page) {
        const auto *v = static_cast<const typename Value::Element *>(a->v[page]) + d;
        const char *ahead = part_ahead(a, first, a->n_pages + page, a->v[page]) + d * PI_PAGE * element_bytes;
        for (int64_t position = 0; position < PI_PAGE;
             ++position, v += a->head_dim, ahead += n * element_bytes) {
            prefetch_bytes_of<vectors * lanes * element_bytes>(ahead);
            if (!(positions[page] >> position & 1))
                continue;
            for (int64_t j = 0; j < vectors; ++j) {
                const vfloat value = whole ? Value::load(v + j * lanes) : Value::load_part(v, n);
                for (int64_t i = 0; i < n_q; ++i)
                    sums[i][j] = vfma(vset(p[i][page * PI_PAGE + position]), value, sums[i][j]);
            }
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

// Values of n_q queries, whose weights are p.
template <typename Value, int64_t n_q>
inline void weigh_all(const pi_attend *a, int64_t first, const float (*p)[most_positions],
                      const float shrink[n_q]) {
    uint32_t positions[PI_ATTEND_PAGES] = {};
    for (int64_t page = 0; page < a->n_pages; ++page) {
        for (int64_t i = 0; i < n_q; ++i)
            positions[page] |= a->visible[page * a->n_q + first + i];
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

// Scores of n_q queries together, then their values, attend_queries at a time.
template <typename Value, int64_t n_q>
void attend_group(const pi_attend *all, int64_t first) {
    const pi_attend seen = seen_pages(all, first, n_q), *a = &seen;
    float p[n_q][most_positions], shrink[n_q];
    for (int64_t page = 0; page < a->n_pages; ++page)
        page_scores<Value, n_q>(a, first, page, p);
    for (int64_t i = 0; i < n_q; ++i) {
        shrink[i] = 1;
        if (!sees_nothing(a, first + i)) {
            shrink[i] = softmax_step(a, first + i, p[i]);
            continue;
        }
        for (int64_t at = 0; at < most_positions; at += lanes)
            vstore(p[i] + at, vzero());
    }
    constexpr int64_t each = n_q < attend_queries ? n_q : attend_queries, rest = n_q % each;
    for (int64_t i = 0; i + each <= n_q; i += each)
        weigh_all<Value, each>(a, first + i, p + i, shrink + i);
    if constexpr (rest > 0)
        weigh_all<Value, rest>(a, first + n_q - rest, p + n_q - rest, shrink + n_q - rest);
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
    for (; first + score_queries <= a->n_q; first += score_queries) {
        attend_group<Value, score_queries>(a, first);
    }
    attend_rest<Value, score_queries - 1>(a, first, a->n_q - first);
}

} // namespace
