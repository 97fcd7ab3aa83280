/* cpu.h: what the processor and the operating system can run. Compiled for the baseline, so that asking is
 * safe everywhere; the answer is the `usable` entry of the kernel tables. */
#ifndef PI_CPU_H
#define PI_CPU_H

#ifdef __cplusplus
extern "C" {
#endif

int pi_cpu_has_avx2(void); /* AVX2, FMA, F16C, and the system saves ymm registers */
int pi_cpu_has_avx512(
    void); /* also AVX-512 F, BW, DQ, VL, VNNI, and the system saves zmm and mask registers */
int pi_cpu_has_avx512_bf16(void); /* also conversion to bfloat16 */
int pi_cpu_has_amx(
    void); /* also tiles and their products of bfloat16, and Linux lets this process use them */
int pi_cpu_has_neon_dotprod(void); /* NEON's products of bytes, FEAT_DotProd */
int pi_cpu_has_neon_i8mm(void);    /* also those of matrices of bytes, FEAT_I8MM */

#ifdef __cplusplus
}
#endif
#endif
