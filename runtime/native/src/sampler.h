// sampler.h: draws the next token from logits. Order, as in llama.cpp: repeat penalty, top-k, top-p, min-p,
// temperature. The draw depends on the logits, the accepted tokens and the seed only.
#pragma once

#include "pi.h"

#include <cstdint>
#include <vector>

namespace pi {

// Natural log of softmax(logits)[token], summed in float64: a vocabulary has up to 2^18 terms.
float log_probability(const float *logits, uint32_t n_vocab, int32_t token);

} // namespace pi

struct pi_sampler {
    // Throws pi::Error (PI_USAGE) for parameters out of range.
    explicit pi_sampler(const pi_sampler_params &params);

    void accept(int32_t token);

    int32_t sample(const float *logits, uint32_t n_vocab);

  private:
    struct Candidate {
        int32_t token;
        float logit;
    };
    // Of equal logits the first; throws Error as fill_candidates does.
    static int32_t likeliest(const float *logits, uint32_t n_vocab);
    void fill_candidates(const float *logits, uint32_t n_vocab);
    void penalise_repeats();
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
