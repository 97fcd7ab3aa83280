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

#endif
