// forward.h: one walk over the layers, the same for every backend and block shape.
#pragma once

#include "model.h"
#include "ops.h"
#include "plan.h"

#include <atomic>

namespace pi {

// What a step leaves behind.
struct Results {
    std::vector<float> logits;   // [wanted, n_vocab]
    std::vector<float> logprobs; // [n_tokens] or empty
    std::vector<uint64_t> fired; // [n_tokens, n_layers, fired_words] or empty; see pi_engine_fired
    uint32_t n_tokens = 0;
};

// A backend's activations of one step; sized for max_batch_tokens.
class Buffers {
  public:
    Buffers(const Ops &ops, Stream &stream, const ModelConfig &config, uint32_t max_tokens);
    ~Buffers();
    Buffers(const Buffers &) = delete;
    Buffers &operator=(const Buffers &) = delete;

    uint64_t n_bytes() const { return n_floats_ * sizeof(float); }

    float *residual; // [n_tokens, n_embd]
    float *normed;   // [n_tokens, n_embd]
    float *q;        // [n_tokens, n_embd_q]
    float *k;        // [n_tokens, n_embd_kv]
    float *v;        // [n_tokens, n_embd_kv]
    float *attended; // [n_tokens, n_embd_q]
    float *block;    // [n_tokens, n_embd] output of attention or FFN before it is added
    float *cosine;   // [n_tokens, n_rot / 2]
    float *sine;     // [n_tokens, n_rot / 2]
    float *logits;   // [logit_rows, n_vocab]

    static constexpr uint32_t logit_rows = 64; // rows of the head computed at a time

  private:
    float *take(uint64_t n_floats);

    const Ops &ops_;
    Stream &stream_;
    uint64_t n_floats_ = 0;
    std::vector<float *> owned_;
};

// A backend and its activations.
struct Side {
    Side(Backend &&with, const ModelConfig &config, uint32_t max_tokens)
        : backend(std::move(with)), ops(*backend.ops), stream(*backend.stream),
          buffers(ops, stream, config, max_tokens) {}

    Backend backend;
    const Ops &ops;
    Stream &stream;
    Buffers buffers;
};

// The sides of every part of a model; a null one is never used.
struct Sides {
    Side *cpu;
    Side *gpu;
    GpuPlacement placement;

    Side &of_layer(uint32_t layer) const { return placement.layers[layer].on_device() ? *gpu : *cpu; }
    Side &of_embedding() const { return placement.embedding ? *gpu : *cpu; }
    Side &of_head() const { return placement.head ? *gpu : *cpu; }
    void synchronize() const {
        for (Side *side : {cpu, gpu}) {
            if (side != nullptr)
                side->ops.synchronize(side->stream);
        }
    }
};

struct Forward {
    const pi_model &model;
    const Plan &plan;
    const Sides &sides;
    const KvCache &cache;
    const bool record_fired;

    // Computes the step's new tokens; their KV slots are reserved. `interrupted` is asked between layers;
    // true ends the step with Error (PI_INTERRUPTED).
    template <typename Interrupted>
    void run(const Step &step, const Interrupted &interrupted, FfnCounts &counts, Results &results) const {
        Side *side = &begin(step, results);
        const std::vector<uint8_t> modes = ffn_modes(step, false);
        const std::vector<uint8_t> exact_layer_modes = ffn_modes(step, true);
        for (uint32_t layer = 0; layer < model.config.n_layers; ++layer) {
            if (interrupted())
                throw_interrupted();
            side = &hand_over(*side, sides.of_layer(layer), step);
            attention(*side, step, layer);
            const bool exact = model.config.is_exact_layer(layer);
            ffn(*side, step, layer, (exact ? exact_layer_modes : modes).data(), counts, results);
        }
        finish(hand_over(*side, sides.of_head(), step), step, results);
        sides.synchronize(); // counts and records arrive, and failures of queued work belong to this step
    }

    // PI_FFN_* of every token: the plan's tier, the batch's rules, the attention sink, and whether the file
    // wants the layer exact.
    std::vector<uint8_t> ffn_modes(const Step &step, bool exact_layer) const;

  private:
    [[noreturn]] static void throw_interrupted();
    // The side that the tokens' embeddings are on.
    Side &begin(const Step &step, Results &results) const;
    void rope_angles(const Step &step) const;
    // Moves the residual stream to the next side, and returns that.
    Side &hand_over(Side &from, Side &to, const Step &step) const;
    void attention(Side &side, const Step &step, uint32_t layer) const;
    void ffn(Side &side, const Step &step, uint32_t layer, const uint8_t *modes, FfnCounts &counts,
             Results &results) const;
    uint64_t fired_words() const { return (model.config.n_ff + 63) / 64; }
    void finish(Side &side, const Step &step, Results &results) const;
    void head(Side &side, const std::vector<uint32_t> &rows, const Step &step, Results &results) const;
    void read_rows(Side &side, std::span<const uint32_t> rows, const Step &step, Results &results) const;
};

} // namespace pi
