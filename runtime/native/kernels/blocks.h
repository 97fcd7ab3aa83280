/* blocks.h: memory layout of the tensor types, as GGUF stores them (little endian, no padding). */
#ifndef PI_BLOCKS_H
#define PI_BLOCKS_H

#include <stdint.h>

#define PI_QK 32 /* elements of a Q4_0, Q4_1 or Q8_0 block */

typedef uint16_t pi_half; /* IEEE binary16 bits */
typedef uint16_t pi_bf16; /* upper half of a binary32 */

/* value[j] = d * (q[j] - 8); q[j] is the low nibble of qs[j] for j < 16, then the high one of qs[j - 16]. */
typedef struct pi_block_q4_0 {
    pi_half d;
    uint8_t qs[PI_QK / 2];
} pi_block_q4_0;

/* value[j] = d * q[j] + m; nibbles as in Q4_0. */
typedef struct pi_block_q4_1 {
    pi_half d;
    pi_half m;
    uint8_t qs[PI_QK / 2];
} pi_block_q4_1;

/* value[j] = d * qs[j]. */
typedef struct pi_block_q8_0 {
    pi_half d;
    int8_t qs[PI_QK];
} pi_block_q8_0;

/* value[j] = d * (q[j] - 16); q[j] has its low nibble in qs as in Q4_0, its fifth bit in bit j of qh. */
typedef struct pi_block_q5_0 {
    pi_half d;
    uint8_t qh[4];
    uint8_t qs[PI_QK / 2];
} pi_block_q5_0;

/* value[j] = d * q[j] + m; q[j] as in Q5_0. */
typedef struct pi_block_q5_1 {
    pi_half d;
    pi_half m;
    uint8_t qh[4];
    uint8_t qs[PI_QK / 2];
} pi_block_q5_1;

/* value[j] = d * table[q[j]]; nibbles as in Q4_0. */
typedef struct pi_block_iq4_nl {
    pi_half d;
    uint8_t qs[PI_QK / 2];
} pi_block_iq4_nl;

/* OCP Microscaling: value[j] = 2^(e - 127) * E2M1(q[j]); nibbles as in Q4_0. */
typedef struct pi_block_mxfp4 {
    uint8_t e;
    uint8_t qs[PI_QK / 2];
} pi_block_mxfp4;

/* Four sub-blocks of 16: value = E4M3(d[s]) * E2M1(q); sub-block s has its nibbles in qs[8 s .. 8 s + 7], the
 * low ones first. */
typedef struct pi_block_nvfp4 {
    uint8_t d[4];
    uint8_t qs[32];
} pi_block_nvfp4;

#define PI_QK_K 256 /* elements of a K-quant block */

/* 16 sub-blocks of 16: value = d * (scales[s] & 15) * q - dmin * (scales[s] >> 4); q of 2 bits. Half h of the
 * block has its 128 q in qs[32 h .. 32 h + 31]: bits 2 k and 2 k + 1 of the bytes are its elements 32 k .. 32
 * k + 31. */
typedef struct pi_block_q2_k {
    uint8_t scales[16];
    uint8_t qs[64];
    pi_half d;
    pi_half dmin;
} pi_block_q2_k;

/* 16 sub-blocks of 16: value = d * (scale[s] - 32) * (q - (high bit ? 0 : 4)); q as in Q2_K, the high bit of
 * element 128 h + 32 k + j in bit 4 h + k of hmask[j]. Scales of 6 bits: four low ones in a nibble, two high
 * ones behind. */
typedef struct pi_block_q3_k {
    uint8_t hmask[32];
    uint8_t qs[64];
    uint8_t scales[12];
    pi_half d;
} pi_block_q3_k;

/* 8 sub-blocks of 32: value = d * scale[s] * q - dmin * min[s]; scale and min of 6 bits packed into scales.
 * Sub-blocks 2 c and 2 c + 1 are the low and the high nibbles of qs[32 c .. 32 c + 31]. */
typedef struct pi_block_q4_k {
    pi_half d;
    pi_half dmin;
    uint8_t scales[12];
    uint8_t qs[128];
} pi_block_q4_k;

/* As Q4_K, with the fifth bit of sub-block s in bit s of qh. */
typedef struct pi_block_q5_k {
    pi_half d;
    pi_half dmin;
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t qs[128];
} pi_block_q5_k;

/* 16 sub-blocks of 16: value = d * scales[s] * (q - 32). Half h has q's low nibbles in ql[64 h ..], elements
 * 0 to 63 in the low and 64 to 127 in the high ones, and bits 4 and 5 of element 32 k + j in bits 2 k, 2 k +
 * 1 of qh[32 h + j]. */
typedef struct pi_block_q6_k {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    pi_half d;
} pi_block_q6_k;

#endif
