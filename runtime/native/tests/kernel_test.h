// kernel_test.h: what the parts of pi_kernel_test share: inputs, bounds, comparisons.
//
// u is the unit roundoff of float. A float sum of n products, in any order, is off by at most about n u times
// the sum of the products' magnitudes (Higham, Accuracy and Stability, section 3.1). References are formed in
// double.
#pragma once

#include "kernels/kernels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/mman.h>

namespace pi::test {

// Memory that ends where a page without access begins: reading or writing beyond it ends the program, under
// an emulator too.
template <typename T>
struct GuardedAllocator {
    using value_type = T;

    T *allocate(size_t n) {
        const size_t room = room_of(n);
        void *memory = mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || mprotect(static_cast<char *>(memory) + room, page, PROT_NONE) != 0)
            throw std::bad_alloc();
        return reinterpret_cast<T *>(static_cast<char *>(memory) + room - n * sizeof(T));
    }
    void deallocate(T *p, size_t n) {
        const size_t room = room_of(n);
        munmap(reinterpret_cast<char *>(p) + n * sizeof(T) - room, room + page);
    }
    bool operator==(const GuardedAllocator &) const { return true; }

  private:
    static constexpr size_t page = 65536; // a multiple of every page
    static size_t room_of(size_t n) { return (n * sizeof(T) + page - 1) / page * page; }
};

template <typename T>
using Guarded = std::vector<T, GuardedAllocator<T>>;
using Floats = Guarded<float>;
using Doubles = std::vector<double>;

constexpr double u = 0x1p-24;
constexpr double exp_error = 1.2e-7; // relative, stated in kernels/simd/exp.inl

// Tests of one table throw std::runtime_error at the first difference.
void test_types(const pi_kernels &table);
void test_vectors(const pi_kernels &table);

inline size_t size_of(int64_t n) {
    return static_cast<size_t>(n);
}

inline Floats normal(int64_t n, unsigned seed, float scale = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> distribution(0, scale);
    Floats x(size_of(n));
    for (float &value : x)
        value = distribution(random);
    return x;
}

inline void expect(bool holds, const std::string &what) {
    if (!holds)
        throw std::runtime_error(what);
}

// |got - want| <= bound, element by element, or below the smallest normal number; a NaN is never within.
inline void expect_within(const Floats &got, const Doubles &want, const Doubles &bound,
                          const std::string &what) {
    for (size_t i = 0; i < want.size(); ++i) {
        const double ratio = std::abs(static_cast<double>(got[i]) - want[i]) / std::max(bound[i], 0x1p-126);
        expect(ratio <= 1, what + ", element " + std::to_string(i) + ": " + std::to_string(got[i]) + " for " +
                               std::to_string(want[i]) + ", " + std::to_string(ratio) + " times the bound");
    }
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// The same bits; one NaN is as good as another.
inline void expect_equal(const float *got, const float *want, int64_t n, const std::string &what) {
    for (int64_t i = 0; i < n; ++i) {
        const bool equal = bits_of(got[i]) == bits_of(want[i]) || (std::isnan(got[i]) && std::isnan(want[i]));
        expect(equal, what + ", element " + std::to_string(i) + ": " + std::to_string(got[i]) + " for " +
                          std::to_string(want[i]));
    }
}

} // namespace pi::test
