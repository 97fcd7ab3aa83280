// bf16_pairs.inl: vectors of pairs of bfloat16, which products in bfloat16 take and add up (AVX512_BF16).

#pragma once

namespace {

// Two bfloat16 in every lane, rounded to nearest even: of a below, of b above.
inline __m512i bf16_pairs(vfloat a, vfloat b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                           7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(b, a));
}

// The same of neighbours: of a below, of b above them.
inline __m512i bf16_neighbours(vfloat a, vfloat b) {
    return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}

// sums + low a * low b + high a * high b of every lane
inline vfloat add_pair_products(vfloat sums, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
}

} // namespace
