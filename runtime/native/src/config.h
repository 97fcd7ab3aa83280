// config.h: the shape of a decoder model, whatever its family: the one description that the forward pass,
// the planner and the C interface read.
#pragma once

#include "gguf.h"

namespace pi {

enum class Norm { rms };
enum class Rope { interleaved };                         // llama's pairs (x[2i], x[2i+1])
enum class Block { attention_then_ffn };                 // falcon's parallel block would be another value
enum class Activation : uint32_t { silu = 0, relu = 1 }; // PI_ACTIVATION_*

struct ModelConfig {
    std::string architecture;
    Norm norm = Norm::rms;
    Rope rope = Rope::interleaved;
    Block block = Block::attention_then_ffn;
    bool gated = true; // the FFN has a gate beside up
    Activation activation = Activation::silu;
    float activation_threshold = 0; // relu: a neuron fires iff its gate is above this

    uint32_t n_layers = 0;
    uint32_t n_embd = 0;
    uint32_t n_ff = 0;
    uint32_t n_vocab = 0;
    uint32_t n_heads = 0;
    uint32_t n_kv_heads = 0;
    uint32_t head_dim = 0;
    uint32_t n_rot = 0; // leading dimensions of a head that rope turns
    uint32_t n_ctx_train = 0;
    uint32_t sliding_window = 0; // 0: none; else a token sees the last so many positions, itself included
    float rms_eps = 0;
    float rope_theta = 0;
    float rope_scale = 1; // positions are multiplied by this (linear scaling: 1 / factor)

    bool sparse_layout = false;     // ffn_down_t instead of ffn_down
    bool has_predictors = false;    // fc1 and fc2 in every layer
    bool tied_head = false;         // no output.weight: the head is token_embd
    float sparse_threshold = 0;     // a neuron is predicted active iff its logit >= this
    std::vector<bool> exact_layers; // that predicted mode computes exactly; empty: none
    uint32_t sink_positions = 1;    // leading positions that are never masked

    bool is_exact_layer(uint32_t layer) const { return !exact_layers.empty() && exact_layers[layer]; }
    uint32_t n_embd_q() const { return n_heads * head_dim; }
    uint32_t n_embd_kv() const { return n_kv_heads * head_dim; }
};

// Reads and checks the configuration; throws Error naming the key at fault.
ModelConfig read_config(const Gguf &file);

} // namespace pi
