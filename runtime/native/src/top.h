// top.h: the largest logits of a row: the largest first, equal ones by token, NaN before all.
#pragma once

#include "pi.h"

#include <cstdint>
#include <vector>

namespace pi {

// A row as a backend leaves it: n_top tokens, their logits, then log_sum, in words of 32 bits.
constexpr uint64_t top_words(uint32_t n_top) {
    return 2 * uint64_t{n_top} + 1;
}

struct TopLogits {
    std::vector<int32_t> tokens; // the largest logit's first
    std::vector<float> logits;
    float log_sum = 0; // log of the row's sum of exp(logit - largest)
};

// out [top_words(n_top)] = those of a row of n_vocab logits; n_top is at most PI_MAX_TOP. Beyond n_vocab:
// token -1 and -inf.
void find_top(const float *logits, uint32_t n_vocab, uint32_t n_top, float *out);

// The first n of the n_top that were found.
TopLogits read_top(const float *words, uint32_t n_top, uint32_t n);

} // namespace pi
