// ffn.h: the pieces of the CPU's feed-forward block.
#pragma once

#include "stream.h"

namespace pi {

// Neurons that fired, with their activations, ascending for every token. Neuron i lies at args.neuron_begin +
// i.
struct Fired {
    int32_t *index; // [n_tokens, stride]
    float *coef;    // [n_tokens, stride]
    int64_t *n;     // [n_tokens]
    int64_t stride;
};

// out [n_tokens, n_embd] of the tokens from token_begin on = sum over the fired neurons of coef * row of
// down_t.
void accumulate_down(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens,
                     const Fired &fired);

// Exact and predicted tokens [token_begin, token_begin + n_tokens): only rows that a token's mask lets
// through are multiplied with it.
void run_sparse(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens);

// Sets the bit of every neuron whose activation is not 0. index null: activation i belongs to neuron i.
void record_fired(const FfnArgs &args, uint32_t token, const int32_t *index, const float *activations,
                  int64_t n);

// Most tokens of one call of the above.
constexpr uint32_t max_union_tokens = 16;

} // namespace pi
