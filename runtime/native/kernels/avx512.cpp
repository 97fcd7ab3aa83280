// avx512.cpp: the table of AVX-512 with VNNI.
#include "cpu.h"
#include "kernels.h"

#include <immintrin.h>
#include <math.h>
#include <stddef.h>

#include "simd/avx512.inl"

const pi_kernels pi_kernels_avx512 = make_avx512_table("avx512", pi_cpu_has_avx512);
