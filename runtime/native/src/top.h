// top.h: the largest logits of a row: the largest first, equal ones by token, NaN before all.
#pragma once

#include "pi.h"

#include <cstdint>
#include <limits>
#include <span>
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

// Of a piece of a row, which one thread searches without taking memory.
class TopPart {
  public:
    static constexpr uint32_t n_logits = 8192; // of all but the last: results do not depend on the threads

    struct Found {
        float logit;
        int32_t token;
    };

    explicit TopPart(uint32_t n_top) : n_top_(n_top) { found_.reserve(2 * size_t{n_top}); }

    // Of tokens [begin, end) of a row.
    void search(const float *logits, uint32_t begin, uint32_t end);
    // Equal logits are to be offered in the order of their tokens: the ones that are there go first.
    void offer(float logit, int32_t token) {
        if (logit <= bound_)
            return;
        found_.push_back({logit, token});
        if (found_.size() == 2 * size_t{n_top_})
            shrink();
    }
    // At most n_top, the largest first; for the last time.
    const std::vector<Found> &in_order();

    const std::vector<Found> &found() const { return found_; }
    double sum() const { return sum_; } // of exp(logit - largest)

  private:
    void shrink();

    uint32_t n_top_;
    float bound_ = std::numeric_limits<float>::quiet_NaN(); // of n_top found; NaN: of fewer
    std::vector<Found> found_;
    double sum_ = 0;
};

// out [top_words(n_top)] = the row's, of all its parts. Beyond the vocabulary: token -1 and -inf.
void merge_top(std::span<const TopPart> parts, uint32_t n_top, float *out);

// The first n of the n_top that were found.
TopLogits read_top(const float *words, uint32_t n_top, uint32_t n);

} // namespace pi
