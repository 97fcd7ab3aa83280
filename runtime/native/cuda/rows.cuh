// rows.cuh: what the products ask of rows.cu and gemm.cu.
#pragma once

#include "k_quants.cuh"

namespace pi_cuda {

// Throws Failure for a type or length without kernels.
void require_rows(const pi_gpu_rows &rows);

// out [n_rows, n_cols]
void dequantise_to_half(pi_gpu &gpu, const pi_gpu_rows &rows, __half *out);

// Activations as float16: value = half * scale[token], a power of two, so that none overflows.
struct Halves {
    const __half *data; // [n_tokens, n_k], zeros between the activation's length and n_k
    const float *scale; // [n_tokens]
    uint32_t n_tokens;
    uint32_t n_k; // a multiple of 32
};

// x [n_tokens, n]
Halves to_halves(pi_gpu &gpu, const float *x, uint32_t n_tokens, uint32_t n);

// out[t * out_stride + j] (+)= sum over k of x[t][k] * w[j][k] (transposed: w[k][j]) (+ bias[j]), j < n_out;
// relu: at least 0
struct Gemm {
    Halves x;
    uint32_t k_begin; // of x
    uint32_t n_k;
    const __half *w;
    uint32_t w_stride; // elements from one row of w to the next
    bool transposed;
    bool accumulate;
    bool relu;
    uint32_t n_out;
    const float *bias; // or null
    float *out;
    uint32_t out_stride;
};

void run_gemm(pi_gpu &gpu, const Gemm &work);

// out [n_rows, n] = the rows of x / rms(x) * gain
void normalise(pi_gpu &gpu, const float *x, const float *gain, uint32_t n_rows, uint32_t n, float eps,
               float *out);

// of.logits of all its rows
void multiply_logits(pi_gpu &gpu, const pi_gpu_predictor &of);
void mask_rows(pi_gpu &gpu, const pi_gpu_mask &work); // without a predictor

// out [n_cols] (+)= sum of coef[i] * row i over all rows; those of coefficients 0 are not read
void accumulate_rows(pi_gpu &gpu, const pi_gpu_rows &rows, const float *coef, bool add, float *out);

} // namespace pi_cuda
