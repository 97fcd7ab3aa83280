// avx512_attention.inl: attention of many queries to an F16 cache in products of 16 bit integers (vpdpwssd),
// which go twice as fast as those of floats. A query and a key are scaled so that their length is 32767: a
// sum of their products fits 32 bits, and rounding is off by less than a cached half is. Weights and values
// share what fits.

#pragma once

#include "attention.inl"

namespace {

constexpr int64_t pair_queries = 6; // 6 x 4 sums
constexpr int64_t pair_vectors = 4;
constexpr int64_t pair_columns = pair_vectors * lanes;
constexpr int64_t most_pair_queries = 128;
constexpr int64_t most_pair_dim = 128;
constexpr int64_t min_pair_queries = 16; // below, packing costs more than it saves
constexpr float longest = 32767;
constexpr float largest_value = 8191;
constexpr float most_weight = 262000; // sum of a query's weights: times largest_value it fits 32 bits

// The pages of a call and its queries, two numbers of 16 bits in every element.
struct alignas(64) PackedCall {
    int32_t keys[most_pair_dim / 2][most_positions];
    int32_t values[most_positions / 2][most_pair_dim];
    int32_t queries[most_pair_queries][most_pair_dim / 2];
    int32_t weights[pair_queries][most_positions / 2];
    int32_t sums[pair_queries][most_positions];
    float key_scale[most_positions]; // a key is its integers times this
    float query_scale[most_pair_queries];
    float value_scale;
};

// 16 bits of a, 16 bits of b in every lane
inline __m512i pair_of(__m512i a, __m512i b) {
    return _mm512_mask_blend_epi16(0xaaaaaaaau, a, _mm512_slli_epi32(b, 16));
}

// Halves without their signs, which order as integers do; NaN comes last.
inline __m512i magnitudes(const pi_half *p) {
    return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7fff));
}

inline void pack_keys(const pi_attend *a, int64_t page, PackedCall *call) {
    for (int64_t j = 0; j < page_vectors; ++j) {
        const int64_t column = page * PI_PAGE + j * lanes;
        const auto *k = static_cast<const pi_half *>(a->k[page]) + j * lanes;
        vfloat squares = vzero();
        for (int64_t d = 0; d < a->head_dim; ++d) {
            const vfloat key = vload_half(k + d * PI_PAGE);
            squares = vfma(key, key, squares);
        }
        const vfloat length = _mm512_sqrt_ps(squares);
        const vfloat scale = vkeep(vgt(length, vzero()), vdiv(vset(longest), length));
        vstore(call->key_scale + column, vdiv(length, vset(longest)));
        for (int64_t d = 0; d < a->head_dim; d += 2) {
            const vfloat first = vload_half(k + d * PI_PAGE), second = vload_half(k + (d + 1) * PI_PAGE);
            const __m512i pair =
                pair_of(_mm512_cvtps_epi32(vmul(first, scale)), _mm512_cvtps_epi32(vmul(second, scale)));
            _mm512_store_si512(&call->keys[d / 2][column], pair);
        }
    }
}

inline void pack_query(const pi_attend *a, int64_t i, PackedCall *call) {
    const float *q = a->q + i * a->head_dim;
    vfloat squares = vzero();
    for (int64_t d = 0; d < a->head_dim; d += lanes)
        squares = vfma(vload(q + d), vload(q + d), squares);
    const float length = __builtin_sqrtf(vsum(squares));
    const vfloat scale = vset(length > 0 ? longest / length : 0);
    call->query_scale[i] = length / longest;
    for (int64_t d = 0; d < a->head_dim; d += lanes) {
        const __m512i whole = _mm512_cvtps_epi32(vmul(vload(q + d), scale));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(&call->queries[i][d / 2]),
                            _mm512_cvtepi32_epi16(whole));
    }
}

// Bit p: some query sees position p of the page.
inline uint32_t seen_positions(const pi_attend *a, int64_t page) {
    uint32_t seen = 0;
    for (int64_t i = 0; i < a->n_q; ++i)
        seen |= a->visible[page * a->n_q + i];
    return seen;
}

// The largest number among what is seen of the values, as half bits.
inline float largest_of_values(const pi_attend *a) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t page = 0; page < a->n_pages; ++page) {
        const uint32_t seen = seen_positions(a, page);
        const auto *v = static_cast<const pi_half *>(a->v[page]);
        for (int64_t position = 0; position < PI_PAGE; ++position, v += a->head_dim) {
            if (!(seen >> position & 1))
                continue; // may hold anything
            for (int64_t d = 0; d < a->head_dim; d += 2 * lanes)
                largest = _mm512_max_epu16(largest, magnitudes(v + d));
        }
    }
    alignas(64) pi_half bounds[2 * lanes];
    _mm512_store_si512(bounds, largest);
    return vmax_lane(vmax(vload_half(bounds), vload_half(bounds + lanes)));
}

inline __m512i whole_values(const pi_half *v, bool seen, vfloat scale) {
    return seen ? _mm512_cvtps_epi32(vmul(vload_half(v), scale)) : _mm512_setzero_si512();
}

inline void pack_values(const pi_attend *a, PackedCall *call) {
    const float largest = largest_of_values(a);
    const vfloat scale = vset(largest > 0 ? largest_value / largest : 0);
    call->value_scale = largest / largest_value;
    for (int64_t page = 0; page < a->n_pages; ++page) {
        const uint32_t seen = seen_positions(a, page);
        const auto *v = static_cast<const pi_half *>(a->v[page]);
        for (int64_t position = 0; position < PI_PAGE; position += 2, v += 2 * a->head_dim) {
            int32_t *to = call->values[(page * PI_PAGE + position) / 2];
            const bool first = seen >> position & 1, second = seen >> (position + 1) & 1;
            for (int64_t d = 0; d < a->head_dim; d += lanes)
                _mm512_store_si512(to + d, pair_of(whole_values(v + d, first, scale),
                                                   whole_values(v + a->head_dim + d, second, scale)));
        }
    }
}

// sums[i][c] = products of the n_pairs pairs of x[i] and column c of w, for pair_columns columns
template <int64_t n_q>
[[gnu::noinline]] void multiply_pairs(const int32_t *x, int64_t x_stride, const int32_t *w, int64_t w_stride,
                                      int64_t n_pairs, int32_t (*sums)[most_positions]) {
    __m512i acc[n_q][pair_vectors];
#pragma GCC unroll 6
    for (int64_t i = 0; i < n_q; ++i) {
#pragma GCC unroll 4
        for (int64_t v = 0; v < pair_vectors; ++v)
            acc[i][v] = _mm512_setzero_si512();
    }
    for (int64_t k = 0; k < n_pairs; ++k, w += w_stride) {
        __m512i columns[pair_vectors];
#pragma GCC unroll 4
        for (int64_t v = 0; v < pair_vectors; ++v)
            columns[v] = _mm512_load_si512(w + v * lanes);
#pragma GCC unroll 6
        for (int64_t i = 0; i < n_q; ++i) {
            const __m512i pair = _mm512_set1_epi32(x[i * x_stride + k]);
#pragma GCC unroll 4
            for (int64_t v = 0; v < pair_vectors; ++v)
                acc[i][v] = _mm512_dpwssd_epi32(acc[i][v], columns[v], pair);
        }
    }
#pragma GCC unroll 6
    for (int64_t i = 0; i < n_q; ++i) {
#pragma GCC unroll 4
        for (int64_t v = 0; v < pair_vectors; ++v)
            _mm512_store_si512(&sums[i][v * lanes], acc[i][v]);
    }
}

// p [n] as integers; returns what a weight is times its integer.
inline float pack_weights(const float *p, int64_t n, const Weights &all, int32_t *weights) {
    const float by_largest = all.largest / longest, by_sum = all.sum / most_weight;
    const float unit = by_largest > by_sum ? by_largest : by_sum;
    const vfloat scale = vset(unit > 0 ? 1 / unit : 0);
    for (int64_t at = 0; at < n; at += lanes) {
        const __m512i whole = _mm512_cvtps_epi32(vmul(vload(p + at), scale));
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(weights + at / 2), _mm512_cvtepi32_epi16(whole));
    }
    return unit;
}

// Scores of the group's queries [n_q][positions].
template <int64_t n_q>
inline void pair_scores(const pi_attend *a, int64_t first, PackedCall *call, float (*p)[most_positions]) {
    const int64_t n = a->n_pages * PI_PAGE;
    for (int64_t column = 0; column < n; column += pair_columns) {
        multiply_pairs<n_q>(call->queries[first], most_pair_dim / 2, &call->keys[0][column], most_positions,
                            a->head_dim / 2,
                            reinterpret_cast<int32_t (*)[most_positions]>(&call->sums[0][column]));
    }
    for (int64_t i = 0; i < n_q; ++i) {
        const vfloat scale = vset(call->query_scale[first + i]);
        for (int64_t at = 0; at < n; at += lanes) {
            const vfloat dots = _mm512_cvtepi32_ps(_mm512_load_si512(&call->sums[i][at]));
            vstore(p[i] + at, vmul(dots, vmul(scale, vload(call->key_scale + at))));
        }
    }
}

template <int64_t n_q>
void attend_pairs(const pi_attend *a, int64_t first, PackedCall *call) {
    float p[n_q][most_positions], shrink[n_q], unit[n_q];
    const int64_t n = a->n_pages * PI_PAGE;
    pair_scores<n_q>(a, first, call, p);
    for (int64_t i = 0; i < n_q; ++i) {
        if (sees_nothing(a, first + i))
            continue;
        const Weights weights = softmax_step(a, first + i, p[i]);
        shrink[i] = weights.shrink;
        unit[i] = pack_weights(p[i], n, weights, call->weights[i]);
    }
    for (int64_t d = 0; d < a->head_dim; d += pair_columns) {
        multiply_pairs<n_q>(call->weights[0], most_positions / 2, &call->values[0][d], most_pair_dim, n / 2,
                            call->sums);
        for (int64_t i = 0; i < n_q; ++i) {
            if (sees_nothing(a, first + i))
                continue;
            float *out = a->out + (first + i) * a->head_dim + d;
            for (int64_t at = 0; at < pair_columns; at += lanes) {
                const vfloat sum = _mm512_cvtepi32_ps(_mm512_load_si512(&call->sums[i][at]));
                vstore(out + at,
                       vfma(sum, vset(unit[i] * call->value_scale), vmul(vset(shrink[i]), vload(out + at))));
            }
        }
    }
}

// n_q <= most
template <int64_t most>
void attend_pairs_rest(const pi_attend *a, int64_t first, int64_t n_q, PackedCall *call) {
    if (n_q == most) {
        attend_pairs<most>(a, first, call);
    } else if constexpr (most > 1) {
        attend_pairs_rest<most - 1>(a, first, n_q, call);
    }
}

void attend_f16_pairs(const pi_attend *a) {
    if (a->n_q < min_pair_queries || a->n_q > most_pair_queries || a->head_dim > most_pair_dim ||
        a->head_dim % pair_columns != 0)
        return attend<F16Value>(a);
    PackedCall call;
    for (int64_t page = 0; page < a->n_pages; ++page)
        pack_keys(a, page, &call);
    if (a->n_pages % 2 != 0) { // columns go in twos of pages
        for (int64_t d = 0; d < a->head_dim / 2; ++d)
            __builtin_memset(&call.keys[d][a->n_pages * PI_PAGE], 0, PI_PAGE * sizeof(int32_t));
    }
    pack_values(a, &call);
    for (int64_t i = 0; i < a->n_q; ++i)
        pack_query(a, i, &call);
    int64_t first = 0;
    for (; first + pair_queries <= a->n_q; first += pair_queries)
        attend_pairs<pair_queries>(a, first, &call);
    attend_pairs_rest<pair_queries - 1>(a, first, a->n_q - first, &call);
}

constexpr pi_kernels with_pair_attention(pi_kernels table) {
    table.attend_f16 = attend_f16_pairs;
    table.rounded_queries = min_pair_queries;
    return table;
}

} // namespace
