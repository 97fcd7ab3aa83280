// attention_tiles.inl: attention_rounded.inl with products on the tiles of tile_gemm.inl, sixteen queries at
// a time. What lies behind the last query is multiplied too; no row of a tile knows of others.

#pragma once

#include "attention_rounded.inl"

namespace {

constexpr int64_t pair_bytes = sizeof(uint32_t);
static_assert(PI_ATTEND_UNIT == tile_depth && PI_PAGE == tile_depth && PI_PAGE == 2 * tile_side);

// scores [16, PI_PAGE] = q . k of one page
inline void tile_scores(const RoundedPages &of, int64_t first, int64_t page,
                        float (*scores)[most_positions]) {
    const int64_t n_pairs = of.depth / 2;
    const uint32_t *q = of.q + first * n_pairs, *k = of.k + page * n_pairs * PI_PAGE;
    float *out = scores[0] + page * PI_PAGE;
    tile_zero<0>();
    tile_zero<1>();
    for (int64_t pair = 0; pair < n_pairs; pair += tile_side, k += tile_side * PI_PAGE) {
        tile_load<4>(q + pair, n_pairs * pair_bytes);
        tile_load<5>(k, PI_PAGE * pair_bytes);
        tile_load<6>(k + tile_side, PI_PAGE * pair_bytes);
        tile_multiply<0, 4, 5>();
        tile_multiply<1, 4, 6>();
    }
    tile_store<0>(out, sizeof scores[0]);
    tile_store<1>(out + tile_side, sizeof scores[0]);
}

// out_i = shrink_i * out_i + sum over positions of p_i * v, of n_q <= 16 queries, 32 dimensions from d on
inline void tile_values(const pi_attend *a, const RoundedPages &of, int64_t first, int64_t n_q, int64_t d,
                        const uint32_t (*p)[position_pairs], const float *shrink) {
    alignas(64) float sums[tile_side][PI_ATTEND_UNIT] = {};
    const int64_t left = a->head_dim - d, n = left < PI_ATTEND_UNIT ? left : PI_ATTEND_UNIT;
    const auto n_bytes = static_cast<size_t>(n) * sizeof(float);
    float *out = a->out + first * a->head_dim + d;
    for (int64_t i = 0; i < n_q; ++i) {
        __builtin_memcpy(sums[i], out + i * a->head_dim, n_bytes);
        for (int64_t j = 0; j < PI_ATTEND_UNIT; j += lanes)
            vstore(sums[i] + j, vmul(vset(shrink[i]), vload(sums[i] + j)));
    }
    tile_load<0>(sums, sizeof sums[0]);
    tile_load<1>(sums[0] + tile_side, sizeof sums[0]);
    for (int64_t page = 0; page < a->n_pages; ++page) {
        const uint32_t *v = of.v + page * page_pairs * of.depth + d;
        tile_load<4>(p[0] + page * page_pairs, sizeof p[0]);
        tile_load<5>(v, of.depth * pair_bytes);
        tile_load<6>(v + tile_side, of.depth * pair_bytes);
        tile_multiply<0, 4, 5>();
        tile_multiply<1, 4, 6>();
    }
    tile_store<0>(sums, sizeof sums[0]);
    tile_store<1>(sums[0] + tile_side, sizeof sums[0]);
    for (int64_t i = 0; i < n_q; ++i) {
        if (!sees_nothing(a, first + i))
            __builtin_memcpy(out + i * a->head_dim, sums[i], n_bytes);
    }
}

void attend_tiles(const pi_attend *a) {
    const RoundedPages of = rounded_pages(a);
    if (!round_pages<F16Value>(a, of))
        return attend<F16Value>(a);
    alignas(64) float scores[tile_side][most_positions];
    alignas(64) uint32_t p[tile_side][position_pairs] = {};
    float shrink[tile_side];
    tiles_begin();
    for (int64_t first = 0; first < a->n_q; first += tile_side) {
        const int64_t n_q = a->n_q - first < tile_side ? a->n_q - first : tile_side;
        const pi_attend seen = seen_pages(a, first, n_q);
        for (int64_t page = 0; page < seen.n_pages; ++page)
            tile_scores(of, first, page, scores);
        for (int64_t i = 0; i < n_q; ++i)
            shrink[i] = weights_of_query(&seen, first + i, scores[i], p[i]);
        for (int64_t d = 0; d < a->head_dim; d += PI_ATTEND_UNIT)
            tile_values(&seen, of, first, n_q, d, p, shrink);
    }
    tiles_end();
}

} // namespace
