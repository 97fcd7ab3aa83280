// exp.inl: exp(x) for x <= 0, which is all that softmax and SiLU ask for.

#pragma once

namespace {

// x = n ln 2 + r, |r| <= ln(2) / 2; exp(r) by the degree 6 polynomial of Cephes' expf (S. Moshier), times
// 2^n. Relative error at most 1.2e-7 (every float tried) for x >= -87.33; below that, where the result would
// be subnormal, exactly 0. NaN stays.
inline vfloat vexp_negative(vfloat x) {
    const vfloat lowest = vset(-87.33654f);
    const vfloat n = vround(vmul(x, vset(1.44269504088896341f)));
    const vfloat r = vfma(n, vset(2.12194440e-4f), vfma(n, vset(-0.693359375f), x));
    vfloat p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(p, vmul(r, r), vadd(r, vset(1)));
    return vdrop(vgt(lowest, x), vscale_power(p, n));
}

} // namespace
