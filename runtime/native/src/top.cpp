#include "top.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace pi {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

struct Found {
    float logit;
    int32_t token;
};

// NaN before all: whoever looks at the largest logit sees that there is one.
bool before(const Found &a, const Found &b) {
    if (std::isnan(a.logit) != std::isnan(b.logit))
        return std::isnan(a.logit);
    const bool equal = a.logit == b.logit || std::isnan(a.logit);
    return equal ? a.token < b.token : a.logit > b.logit;
}

// In order of tokens, so that of equal logits the ones that are there go first.
class Largest {
  public:
    explicit Largest(uint32_t n_top) : n_top_(n_top) { found_.reserve(2 * size_t{n_top}); }

    void offer(float logit, int32_t token) {
        if (logit <= bound_)
            return;
        found_.push_back({logit, token});
        if (found_.size() == 2 * size_t{n_top_})
            shrink();
    }
    std::vector<Found> in_order() {
        const size_t n = std::min<size_t>(n_top_, found_.size());
        std::partial_sort(found_.begin(), found_.begin() + static_cast<std::ptrdiff_t>(n), found_.end(),
                          before);
        found_.resize(n);
        return std::move(found_);
    }

  private:
    void shrink() {
        const auto last = found_.begin() + n_top_ - 1;
        std::nth_element(found_.begin(), last, found_.end(), before);
        bound_ = last->logit;
        found_.resize(n_top_);
    }

    uint32_t n_top_;
    float bound_ = std::numeric_limits<float>::quiet_NaN(); // of n_top found; NaN: of fewer
    std::vector<Found> found_;
};

// In float64: a vocabulary has up to 2^18 terms.
float log_sum_of(const float *logits, uint32_t n_vocab, float largest) {
    double sum = 0;
    for (uint32_t i = 0; i < n_vocab; ++i)
        sum += logits[i] == -infinity ? 0.0 : std::exp(static_cast<double>(logits[i] - largest));
    return static_cast<float>(std::log(sum));
}

} // namespace

void find_top(const float *logits, uint32_t n_vocab, uint32_t n_top, float *out) {
    Largest largest(n_top);
    for (uint32_t i = 0; i < n_vocab; ++i)
        largest.offer(logits[i], static_cast<int32_t>(i));
    const std::vector<Found> found = largest.in_order();
    for (uint32_t i = 0; i < n_top; ++i) {
        out[i] = std::bit_cast<float>(i < found.size() ? found[i].token : -1);
        out[n_top + i] = i < found.size() ? found[i].logit : -infinity;
    }
    out[2 * uint64_t{n_top}] = log_sum_of(logits, n_vocab, found[0].logit);
}

TopLogits read_top(const float *words, uint32_t n_top, uint32_t n) {
    TopLogits top;
    for (uint32_t i = 0; i < n; ++i)
        top.tokens.push_back(std::bit_cast<int32_t>(words[i]));
    top.logits.assign(words + n_top, words + n_top + n);
    top.log_sum = words[2 * uint64_t{n_top}];
    return top;
}

} // namespace pi
