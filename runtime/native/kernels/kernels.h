/* kernels.h: the table of inner loops that every instruction set fills in.
 *
 * A kernel file is compiled with its own -m flags, so it must not emit a symbol that other files could share
 * (no std::, no inline functions with external linkage): the linker would pick that copy for everyone.
 * Results of a kernel do not depend on how callers split rows or columns among threads. */
#ifndef PI_KERNELS_H
#define PI_KERNELS_H

#include "blocks.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PI_PAGE 32 /* token positions of a KV page */

/* Dense index of the tensor types (registry order; see src/types.cpp). */
enum {
    PI_KT_F32 = 0,
    PI_KT_F16,
    PI_KT_BF16,
    PI_KT_Q8_0,
    PI_KT_Q4_0,
    PI_KT_Q4_1,
    PI_KT_Q5_0,
    PI_KT_Q5_1,
    PI_KT_Q2_K,
    PI_KT_Q3_K,
    PI_KT_Q4_K,
    PI_KT_Q5_K,
    PI_KT_Q6_K,
    PI_KT_IQ4_NL,
    PI_KT_MXFP4,
    PI_KT_NVFP4,
    PI_KT_COUNT
};

/* Rows of a weight matrix: index[i] (NULL: i) for i < n_rows, each n_cols elements, row_bytes apart. ahead
 * [n_ahead]: rows that the next call will read (axpy fetches them while it ends). */
typedef struct pi_rows {
    const void *base;
    int64_t row_bytes;
    int64_t n_cols;
    const int32_t *index;
    int64_t n_rows;
    const int32_t *ahead;
    int64_t n_ahead;
} pi_rows;

/* A float vector as int8 blocks of 32: x[32 b + j] = d[b] * q[32 b + j]; s[b] = d[b] * sum of its q. Types
 * whose scale or minimum changes every 16 elements need the sums of halves: h[2 b + i] = d[b] * sum of the q
 * of half i. */
typedef struct pi_q8_vector {
    int8_t *q;
    float *d;
    float *s;
    float *h;
} pi_q8_vector;

typedef struct pi_type_kernels {
    /* out [n] = elements [begin, begin + n) of one row; begin is a multiple of the block */
    void (*dequantize)(const void *row, int64_t begin, int64_t n, float *out);
    /* out [n_rows] = row . x */
    void (*dot_f32)(const pi_rows *w, const float *x, float *out);
    /* the same with int8 activations; NULL for types that take float activations only */
    void (*dot_q8)(const pi_rows *w, const pi_q8_vector *x, float *out);
    /* out[t * out_stride + r] = row r . token t of x, whose arrays hold n_tokens tokens one after the other;
     * NULL where this table multiplies many tokens as floats (gemm_tile) */
    void (*many_q8)(const pi_rows *w, const pi_q8_vector *x, int64_t n_tokens, float *out,
                    int64_t out_stride);
    /* y [n] += sum_i coef[i] * row_i[begin, begin + n), summed in the order of i for every column;
     * begin is a multiple of 32 and of the block. Rows whose coefficient is 0 leave y's bits alone. */
    void (*axpy)(const pi_rows *w, const float *coef, int64_t begin, int64_t n, float *y);
} pi_type_kernels;

#define PI_ATTEND_PAGES 4 /* most pages of a call */

/* Queries that share one KV head, against some pages of it. The softmax is kept online: after the last call
 * out[i] / sum[i] is the attention output and peak[i] + log(sum[i]) its log-sum-exp. Start: peak -inf, sum 0,
 * out 0. */
typedef struct pi_attend {
    const float *q;                 /* [n_q, head_dim], already scaled by 1/sqrt(head_dim) */
    const void *k[PI_ATTEND_PAGES]; /* of each page [head_dim, PI_PAGE] */
    const void *v[PI_ATTEND_PAGES]; /* of each page [PI_PAGE, head_dim] */
    /* of the next calls, each as large as the keys of a page: fetched one by one while the call goes through
     * its keys and values. Any address will do after the last. */
    const void *ahead[2 * PI_ATTEND_PAGES];
    const uint32_t *visible; /* [n_pages, n_q] bit p: query i sees position p of the page */
    int64_t n_pages;
    float *out;  /* [n_q, head_dim] */
    float *peak; /* [n_q] */
    float *sum;  /* [n_q] */
    int64_t n_q;
    int64_t head_dim;
    void *room; /* of attend_rounded: PI_ATTEND_ROOM(n_q, head_dim) bytes */
} pi_attend;

#define PI_ATTEND_UNIT                                                                                       \
    32 /* attend_rounded's queries and keys are filled up with zeros to multiples of it                      \
        */
#define PI_ATTEND_ROOM(n_q, head_dim)                                                                        \
    (((n_q) + 2 * PI_ATTEND_PAGES * PI_PAGE) *                                                               \
     (((head_dim) + PI_ATTEND_UNIT - 1) / PI_ATTEND_UNIT * PI_ATTEND_UNIT * (int64_t)sizeof(pi_bf16)))

typedef struct pi_kernels {
    const char *name;
    int (*usable)(void); /* processor and operating system can run this table */
    pi_type_kernels type[PI_KT_COUNT];

    /* n is a multiple of 32 */
    void (*quantize_q8)(const float *x, int64_t n, const pi_q8_vector *out);
    /* out = x / sqrt(mean(x^2) + eps) * gain */
    void (*rms_norm)(const float *x, const float *gain, int64_t n, float eps, float *out);
    /* out = silu(gate) * up */
    void (*gated_silu)(const float *gate, const float *up, int64_t n, float *out);
    /* out = (gate > threshold ? gate : 0) * up; returns how many gates are above the threshold */
    int64_t (*gated_relu)(const float *gate, const float *up, int64_t n, float threshold, float *out);
    /* y += x */
    void (*add)(const float *x, int64_t n, float *y);
    /* pairs (x[2i], x[2i+1]), i < n_rot / 2, of each head rotated by the angle of that cosine and sine */
    void (*rope)(float *x, int64_t n_heads, int64_t head_dim, int64_t n_rot, const float *cosine,
                 const float *sine);
    /* out[r * out_stride + t] += sum_k w[r * row_stride + k * k_stride] * x[k * gemm_panel + t]
     * for r < n_rows, t < gemm_panel */
    void (*gemm_tile)(const float *w, int64_t row_stride, int64_t k_stride, int64_t n_rows, const float *x,
                      int64_t n_k, float *out, int64_t out_stride);
    int64_t gemm_panel; /* tokens of a packed panel, at most 64 */
    /* The same product on a matrix unit, both factors rounded to bfloat16; NULL where there is none. A packed
     * panel has gemm_panel, packed weights have n_rows rounded up to 32 times n_k rounded up to 32 elements.
     */
    void (*round_panel)(const float *x, int64_t n_k, pi_bf16 *out);
    void (*round_weights)(const float *w, int64_t row_stride, int64_t k_stride, int64_t n_rows, int64_t n_k,
                          pi_bf16 *out);
    void (*gemm_rounded)(const pi_bf16 *w, int64_t n_rows, const pi_bf16 *x, int64_t n_k, float *out,
                         int64_t out_stride);
    void (*attend_f32)(const pi_attend *a);
    void (*attend_f16)(const pi_attend *a);
    /* attend_f16 for many queries, their factors rounded to bfloat16; NULL where that is no faster */
    void (*attend_rounded)(const pi_attend *a);
    void (*to_half)(const float *x, int64_t n, pi_half *out); /* round to nearest even */
} pi_kernels;

extern const pi_kernels pi_kernels_scalar; /* the reference */
#if defined(__x86_64__)
extern const pi_kernels pi_kernels_avx2;
extern const pi_kernels pi_kernels_avx512;
extern const pi_kernels pi_kernels_avx512_bf16;
extern const pi_kernels pi_kernels_amx;
#ifdef PI_AMX_EMULATOR
extern const pi_kernels pi_kernels_amx_emulated; /* tiles in software, for tests */
#endif
#elif defined(__aarch64__)
extern const pi_kernels pi_kernels_neon;
extern const pi_kernels pi_kernels_neon_dotprod;
extern const pi_kernels pi_kernels_neon_i8mm;
#endif

#ifdef __cplusplus
}
#endif
#endif
