#include "sampler.h"

#include "status.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

void require_finite(const char *name, float value) {
    if (!std::isfinite(value))
        pi::throw_usage(std::string(name) + " is not a finite number");
}

[[noreturn]] void throw_not_finite() {
    throw pi::Error(PI_FAILURE, "the model computed a logit that is no finite number",
                    "the weights are damaged, or overflow in this type; try another --outtype");
}

// Descending logits; equal ones by token, so that the order never depends on the sorting algorithm.
template <typename Candidate>
bool before(const Candidate &a, const Candidate &b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

} // namespace

float pi::log_probability(const float *logits, uint32_t n_vocab, int32_t token) {
    const float peak = *std::max_element(logits, logits + n_vocab);
    double sum = 0;
    for (uint32_t i = 0; i < n_vocab; ++i)
        sum += std::exp(static_cast<double>(logits[i] - peak));
    return static_cast<float>(static_cast<double>(logits[token] - peak) - std::log(sum));
}

float pi::log_probability(const TopLogits &top, int32_t token) {
    const auto at = std::find(top.tokens.begin(), top.tokens.end(), token) - top.tokens.begin();
    return top.logits[static_cast<size_t>(at)] - top.logits[0] - top.log_sum;
}

pi_sampler::pi_sampler(const pi_sampler_params &params) : params_(params), random_state_(params.seed) {
    pi::require_size(params, "sampler params");
    require_finite("temperature", params.temperature);
    require_finite("top_p", params.top_p);
    require_finite("min_p", params.min_p);
    require_finite("repeat_penalty", params.repeat_penalty);
    if (params.repeat_penalty <= 0)
        pi::throw_usage("repeat_penalty must be positive");
    if (params.repeat_last_n < -1)
        pi::throw_usage("repeat_last_n must be -1 or more");
}

void pi_sampler::accept(int32_t token) {
    recent_.push_back(token);
}

int32_t pi_sampler::sample(const float *logits, uint32_t n_vocab) {
    if (n_vocab == 0)
        pi::throw_usage("there are no logits to sample from");
    if (params_.temperature <= 0 && params_.repeat_penalty == 1.0f)
        return likeliest(logits, n_vocab);
    fill_candidates(logits, n_vocab);
    penalise_repeats([&](int32_t token) {
        const bool known = token >= 0 && static_cast<uint32_t>(token) < n_vocab;
        return known ? &candidates_[static_cast<size_t>(token)] : nullptr;
    });
    return choose();
}

int32_t pi_sampler::sample(const pi::TopLogits &top, uint32_t n_vocab) {
    const size_t n = top.tokens.size();
    if (n_top() == 0 || n < std::min(n_top(), n_vocab))
        pi::throw_usage("the row's " + std::to_string(n) + " largest logits are not enough to sample from");
    const float largest = top.logits[0]; // NaN, where there is one
    if (!(largest < std::numeric_limits<float>::infinity()) ||
        largest == -std::numeric_limits<float>::infinity())
        throw_not_finite();
    candidates_.clear();
    for (size_t i = 0; i < n; ++i)
        candidates_.push_back({top.tokens[i], top.logits[i]});
    penalise_repeats([&](int32_t token) {
        const auto found = std::find(top.tokens.begin(), top.tokens.end(), token);
        return found == top.tokens.end() ? nullptr
                                         : &candidates_[static_cast<size_t>(found - top.tokens.begin())];
    });
    return choose();
}

uint32_t pi_sampler::n_top() const {
    const bool penalised = params_.repeat_penalty != 1.0f;
    const bool greedy = params_.temperature <= 0;
    // Below 1 the penalty lifts tokens that are not among the largest.
    if (params_.repeat_penalty < 1.0f || (!greedy && params_.top_k <= 0))
        return 0;
    const uint64_t kept = greedy ? 1 : static_cast<uint64_t>(params_.top_k);
    const uint64_t needed = kept + (penalised ? repeated_tokens().size() : 0); // all of those may fall behind
    return needed <= PI_MAX_TOP ? static_cast<uint32_t>(needed) : 0;
}

int32_t pi_sampler::choose() {
    if (params_.temperature <= 0)
        return std::min_element(candidates_.begin(), candidates_.end(), before<Candidate>)->token;
    keep_top_k();
    keep_top_p();
    keep_min_p();
    return draw();
}

int32_t pi_sampler::likeliest(const float *logits, uint32_t n_vocab) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    float peak = -infinity;
    bool finite = true;
    for (uint32_t i = 0; i < n_vocab; ++i) { // without a branch: many at once
        finite &= logits[i] < infinity;
        peak = logits[i] > peak ? logits[i] : peak;
    }
    if (!finite || peak == -infinity)
        throw_not_finite();
    return static_cast<int32_t>(std::find(logits, logits + n_vocab, peak) - logits);
}

void pi_sampler::fill_candidates(const float *logits, uint32_t n_vocab) {
    candidates_.clear();
    bool possible = false;
    for (uint32_t i = 0; i < n_vocab; ++i) {
        if (!(logits[i] < std::numeric_limits<float>::infinity()))
            throw_not_finite();
        possible |= logits[i] > -std::numeric_limits<float>::infinity(); // -inf: a token that is ruled out
        candidates_.push_back({static_cast<int32_t>(i), logits[i]});
    }
    if (!possible)
        throw_not_finite();
}

std::vector<int32_t> pi_sampler::repeated_tokens() const {
    const size_t n = params_.repeat_last_n < 0
                         ? recent_.size()
                         : std::min(recent_.size(), static_cast<size_t>(params_.repeat_last_n));
    std::vector<int32_t> tokens(recent_.end() - static_cast<std::ptrdiff_t>(n), recent_.end());
    std::sort(tokens.begin(), tokens.end());
    tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
    return tokens;
}

// Keskar et al. 2019 (CTRL), section 4.1: logits of recent tokens are divided by the penalty, or multiplied
// when negative.
template <typename Find>
void pi_sampler::penalise_repeats(const Find &find) {
    if (params_.repeat_penalty == 1.0f)
        return;
    for (const int32_t token : repeated_tokens()) {
        if (Candidate *candidate = find(token); candidate != nullptr) {
            float &logit = candidate->logit;
            logit = logit > 0 ? logit / params_.repeat_penalty : logit * params_.repeat_penalty;
        }
    }
}

// Leaves the candidates sorted.
void pi_sampler::keep_top_k() {
    const size_t k = params_.top_k <= 0 ? candidates_.size()
                                        : std::min(candidates_.size(), static_cast<size_t>(params_.top_k));
    std::partial_sort(candidates_.begin(), candidates_.begin() + static_cast<std::ptrdiff_t>(k),
                      candidates_.end(), before<Candidate>);
    candidates_.resize(k);
}

// Holtzman et al. 2020: the smallest head of the distribution whose mass reaches top_p; at least one token.
void pi_sampler::keep_top_p() {
    if (params_.top_p >= 1.0f)
        return;
    const float peak = candidates_[0].logit;
    double total = 0;
    for (const Candidate &candidate : candidates_)
        total += std::exp(static_cast<double>(candidate.logit - peak));
    double mass = 0;
    size_t n = 0;
    while (n < candidates_.size() && (n == 0 || mass < static_cast<double>(params_.top_p) * total))
        mass += std::exp(static_cast<double>(candidates_[n++].logit - peak));
    candidates_.resize(n);
}

// Nguyen et al. 2024: tokens at least min_p times as probable as the likeliest.
void pi_sampler::keep_min_p() {
    if (params_.min_p <= 0.0f)
        return;
    const float lowest = candidates_[0].logit + std::log(params_.min_p);
    size_t n = 1;
    while (n < candidates_.size() && candidates_[n].logit >= lowest)
        ++n;
    candidates_.resize(n);
}

int32_t pi_sampler::draw() {
    const float peak = candidates_[0].logit;
    double total = 0;
    for (const Candidate &candidate : candidates_)
        total += std::exp(static_cast<double>((candidate.logit - peak) / params_.temperature));
    double left = uniform() * total;
    for (const Candidate &candidate : candidates_) {
        left -= std::exp(static_cast<double>((candidate.logit - peak) / params_.temperature));
        if (left < 0)
            return candidate.token;
    }
    return candidates_.back().token;
}

// SplitMix64 (Steele et al. 2014): 53 random bits in [0, 1).
double pi_sampler::uniform() {
    random_state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = random_state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return static_cast<double>(z >> 11) * 0x1.0p-53;
}
