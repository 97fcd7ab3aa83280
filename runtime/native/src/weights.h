// weights.h: where the rows of every matrix are. A matrix may live in parts, each in one home (the mapped
// file today; a host arena, a device or a stream slot likewise); whoever computes asks for a range of rows.
#pragma once

#include "config.h"
#include "kernels/kernels.h"
#include "types.h"

namespace pi {

enum class Home { mapped_file };

// Rows [begin, end) of a matrix.
struct Part {
    Home home;
    uint64_t begin;
    uint64_t end;
    const uint8_t *data;
};

struct Matrix {
    const TypeInfo *type = nullptr;
    uint64_t n_rows = 0; // outputs
    uint64_t n_cols = 0; // inputs, contiguous
    uint64_t row_bytes = 0;
    std::vector<Part> parts; // ascending, without gaps

    // Rows [begin, end), which lie in one part.
    pi_rows rows(uint64_t begin, uint64_t end) const;
    pi_rows rows() const { return rows(0, n_rows); }
    // Columns [begin, end) of every row, cut between blocks; row_bytes is still from one row to the next.
    Matrix columns(uint64_t begin, uint64_t end) const;
    uint64_t n_bytes() const { return n_rows * row_bytes; }
};

struct LayerWeights {
    const float *attn_norm = nullptr; // [n_embd]
    Matrix q;                         // [n_embd_q, n_embd]
    Matrix k;                         // [n_embd_kv, n_embd]
    Matrix v;                         // [n_embd_kv, n_embd]
    Matrix attn_output;               // [n_embd, n_embd_q]
    const float *q_bias = nullptr;    // [n_embd_q] or none
    const float *k_bias = nullptr;
    const float *v_bias = nullptr;
    const float *attn_output_bias = nullptr; // [n_embd] or none
    const float *ffn_norm = nullptr;         // [n_embd]
    Matrix gate;                             // [n_ff, n_embd]
    Matrix up;                               // [n_ff, n_embd]
    Matrix down;                             // plain layout: [n_embd, n_ff]
    Matrix down_t;                           // sparse layout: [n_ff, n_embd], one neuron a row
    Matrix predictor_fc1;                    // [rank, n_embd]
    Matrix predictor_fc2;                    // [n_ff, rank]
};

struct Weights {
    Matrix embedding;                    // [n_vocab, n_embd]
    Matrix head;                         // [n_vocab, n_embd], the embedding itself when tied
    const float *output_norm = nullptr;  // [n_embd]
    const float *rope_factors = nullptr; // [n_rot / 2] divisors of the frequencies, or none
    std::vector<LayerWeights> layers;

    uint64_t n_bytes() const;
    bool all_float32() const;
};

// Finds every tensor the configuration asks for and checks its type and shape; `file` outlives the result.
Weights find_weights(const Gguf &file, const ModelConfig &config);

} // namespace pi
