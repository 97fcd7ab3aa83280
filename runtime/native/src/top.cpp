#include "top.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace pi {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

using Found = TopPart::Found;

// NaN before all: whoever looks at the largest logit sees that there is one.
bool before(const Found &a, const Found &b) {
    if (std::isnan(a.logit) != std::isnan(b.logit))
        return std::isnan(a.logit);
    const bool equal = a.logit == b.logit || std::isnan(a.logit);
    return equal ? a.token < b.token : a.logit > b.logit;
}

} // namespace

const std::vector<Found> &TopPart::in_order() {
    const size_t n = std::min<size_t>(n_top_, found_.size());
    std::partial_sort(found_.begin(), found_.begin() + static_cast<std::ptrdiff_t>(n), found_.end(), before);
    found_.resize(n);
    return found_;
}

void TopPart::shrink() {
    const auto last = found_.begin() + n_top_ - 1;
    std::nth_element(found_.begin(), last, found_.end(), before);
    bound_ = last->logit;
    found_.resize(n_top_);
}

// The sum in float64: a vocabulary has up to 2^18 terms.
void TopPart::search(const float *logits, uint32_t begin, uint32_t end) {
    for (uint32_t i = begin; i < end; ++i)
        offer(logits[i], static_cast<int32_t>(i));
    const float largest = in_order()[0].logit;
    for (uint32_t i = begin; i < end; ++i)
        sum_ += logits[i] == -infinity ? 0.0 : std::exp(static_cast<double>(logits[i] - largest));
}

void merge_top(std::span<const TopPart> parts, uint32_t n_top, float *out) {
    TopPart row(n_top);
    for (const TopPart &part : parts) {
        for (const Found &one : part.found())
            row.offer(one.logit, one.token);
    }
    const std::vector<Found> &found = row.in_order();
    double sum = 0;
    for (const TopPart &part : parts) {
        const auto below = static_cast<double>(part.found()[0].logit - found[0].logit);
        sum += part.sum() == 0 ? 0.0 : part.sum() * std::exp(below);
    }
    for (uint32_t i = 0; i < n_top; ++i) {
        out[i] = std::bit_cast<float>(i < found.size() ? found[i].token : -1);
        out[n_top + i] = i < found.size() ? found[i].logit : -infinity;
    }
    out[2 * uint64_t{n_top}] = static_cast<float>(std::log(sum));
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
