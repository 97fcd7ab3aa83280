// sampler.h: draws the next token from logits. Order, as in llama.cpp: repeat penalty, top-k, top-p, min-p,
// temperature. The draw depends on the logits, the accepted tokens and the seed only.
#pragma once

#include "pi.h"
#include "top.h"

#include <cstdint>
#include <vector>

namespace pi {

// Natural log of softmax(logits)[token], summed in float64: a vocabulary has up to 2^18 terms.
float log_probability(const float *logits, uint32_t n_vocab, int32_t token);

// The same of one of the largest logits.
float log_probability(const TopLogits &top, int32_t token);

} // namespace pi

struct pi_sampler {
    // Throws pi::Error (PI_USAGE) for parameters out of range.
    explicit pi_sampler(const pi_sampler_params &params);

    void accept(int32_t token);

    int32_t sample(const float *logits, uint32_t n_vocab);
    // The same token, of the n_top() largest logits, or of all where there are fewer.
    int32_t sample(const pi::TopLogits &top, uint32_t n_vocab);
    // How many of the largest logits that needs; 0: all.
    uint32_t n_top() const;

  private:
    struct Candidate {
        int32_t token;
        float logit;
    };
    // Of equal logits the first; throws Error as fill_candidates does.
    static int32_t likeliest(const float *logits, uint32_t n_vocab);
    void fill_candidates(const float *logits, uint32_t n_vocab);
    // Those that the repeat penalty is for, each once, ascending.
    std::vector<int32_t> repeated_tokens() const;
    // By the repeated tokens' places among the candidates.
    template <typename Find>
    void penalise_repeats(const Find &find);
    int32_t choose();
    void keep_top_k();
    void keep_top_p();
    void keep_min_p();
    int32_t draw();
    double uniform();

    pi_sampler_params params_;
    uint64_t random_state_;
    std::vector<int32_t> recent_; // accepted tokens, the newest last
    std::vector<Candidate> candidates_;
};
