#include "cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

struct Registers {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t part = 0) {
    Registers r;
    if (!__get_cpuid_count(leaf, part, &r.eax, &r.ebx, &r.ecx, &r.edx))
        return {};
    return r;
}

// Register state that the operating system saves on a context switch (XCR0); 0 when it offers no XSAVE.
uint32_t saved_state() {
    const Registers leaf1 = cpuid(1);
    if ((leaf1.ecx & bit_OSXSAVE) == 0)
        return 0;
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool has_all(uint32_t value, uint32_t bits) {
    return (value & bits) == bits;
}

constexpr uint32_t state_ymm = 0x06;      // SSE and AVX
constexpr uint32_t state_zmm = 0xe6;      // and opmask, upper halves of zmm0-15, zmm16-31
constexpr uint32_t state_tiles = 0x60000; // configuration and data of tiles

bool find_avx2() {
    return has_all(saved_state(), state_ymm) && has_all(cpuid(1).ecx, bit_AVX | bit_FMA | bit_F16C) &&
           has_all(cpuid(7).ebx, bit_AVX2);
}

bool find_avx512() {
    const Registers leaf7 = cpuid(7);
    return find_avx2() && has_all(saved_state(), state_zmm) &&
           has_all(leaf7.ebx, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL) &&
           has_all(leaf7.ecx, bit_AVX512VNNI);
}

bool find_avx512_bf16() {
    return find_avx512() && has_all(cpuid(7, 1).eax, bit_AVX512BF16);
}

// Linux saves tiles only for a process that asks: a thread's state grows by 8 KiB. Refused where a thread's
// signal stack is too small for them.
bool permitted_tiles() {
    constexpr long request = 0x1023, tile_data = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

bool find_amx() {
    return find_avx512_bf16() && has_all(saved_state(), state_zmm | state_tiles) &&
           has_all(cpuid(7).edx, bit_AMX_TILE | bit_AMX_BF16) && permitted_tiles();
}

} // namespace

// Asked once: on a virtual machine every cpuid is a trip to the hypervisor.
int pi_cpu_has_avx2(void) {
    static const bool has = find_avx2();
    return has;
}

int pi_cpu_has_avx512(void) {
    static const bool has = find_avx512();
    return has;
}

int pi_cpu_has_avx512_bf16(void) {
    static const bool has = find_avx512_bf16();
    return has;
}

int pi_cpu_has_amx(void) {
    static const bool has = find_amx();
    return has;
}
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>

int pi_cpu_has_neon_dotprod(void) {
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
}

int pi_cpu_has_neon_i8mm(void) {
    return pi_cpu_has_neon_dotprod() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
}
#endif
