// ffn.h: the pieces of the CPU's feed-forward block.
#pragma once

#include "stream.h"

#include <algorithm>

namespace pi {

// Neurons that fired, with their activations, ascending for every token. Neuron i lies at args.neuron_begin +
// i.
struct Fired {
    int32_t *index; // [n_tokens, stride]
    float *coef;    // [n_tokens, stride]
    int64_t *n;     // [n_tokens]
    int64_t stride;
};

// Tells args.deliver, where there is one, that all columns of these tokens are there.
void deliver(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens);

// out [n_tokens, n_embd] of the tokens from token_begin on, which are delivered = sum over the fired neurons
// of coef * row of down_t.
void accumulate_down(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens,
                     const Fired &fired);

// task(token, begin, n) for ranges of the columns of all tokens, as many as the threads can use, cut as
// FfnArgs::deliver wants them.
template <typename Task>
void for_columns(CpuStream &stream, uint32_t n_tokens, uint32_t n_columns, const Task &task) {
    const uint32_t n_each = (stream.pool.n_threads() + n_tokens - 1) / n_tokens;
    const uint32_t n_units = (n_columns + delivered_columns - 1) / delivered_columns;
    const uint32_t width = (n_units + n_each - 1) / n_each * delivered_columns;
    const uint32_t n_ranges = (n_columns + width - 1) / width;
    stream.pool.run(int64_t{n_tokens} * n_ranges, [&](int64_t i, uint32_t) {
        const auto item = static_cast<uint32_t>(i);
        const uint32_t begin = item % n_ranges * width;
        task(item / n_ranges, begin, std::min(width, n_columns - begin));
    });
}

// Exact and predicted tokens [token_begin, token_begin + n_tokens): only rows that a token's mask lets
// through are multiplied with it.
void run_sparse(CpuStream &stream, const FfnArgs &args, uint32_t token_begin, uint32_t n_tokens);

// Sets the bit of every neuron whose activation is not 0. index null: activation i belongs to neuron i.
void record_fired(const FfnArgs &args, uint32_t token, const int32_t *index, const float *activations,
                  int64_t n);

// Most tokens of one call of the above.
constexpr uint32_t max_union_tokens = 16;

} // namespace pi
