// forward.h: one walk over the layers, the same for every backend and block shape.
#pragma once

#include "model.h"
#include "ops.h"
#include "plan.h"
#include "top.h"

#include <algorithm>
#include <atomic>
#include <functional>

namespace pi {

// What a step leaves behind.
struct Results {
    std::vector<float> logits;   // [wanted whole, n_vocab]
    std::vector<TopLogits> tops; // [wanted] without tokens where all logits are
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
    float *logits;   // [logit_rows, n_vocab]
    float *top;      // [logit_rows, top_words(n_top)]

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

class HandOver;
class ColdWeights;

// The sides of every part of a model; a null one is never used.
struct Sides {
    Side *cpu;
    Side *gpu;
    HandOver *hand_over;       // where layers are split
    ColdWeights *cold_weights; // where large steps compute the CPU's share of them on the device
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

// A step on its way through the model.
struct Pass {
    const Step &step;
    const RopeAngles angles;
    const std::vector<uint8_t> modes;             // [n_tokens] PI_FFN_*
    const std::vector<uint8_t> exact_layer_modes; // [n_tokens] where the file wants the layer exact
    FfnCounts &counts;
    Results &results;
    const std::function<void()> check_interrupted; // throws Error (PI_INTERRUPTED)
};

struct Forward {
    const pi_model &model;
    const Plan &plan;
    const Sides &sides;
    const KvCache &cache;
    const bool record_fired;

    // Computes the step's new tokens; their KV slots are reserved. `interrupted` is asked between layers (a
    // graph is one), and while the CPU waits for the device; true ends the step with Error (PI_INTERRUPTED).
    template <typename Interrupted>
    void run(const Step &step, const Interrupted &interrupted, FfnCounts &counts, Results &results) const {
        const auto check_interrupted = [&] {
            if (interrupted())
                throw_interrupted();
        };
        const Pass pass{step,   rope_angles(step), ffn_modes(step, false), ffn_modes(step, true),
                        counts, results,           check_interrupted};
        Side *side = &begin(pass);
        for (uint32_t part = first_part(step), end = part; part < n_parts(); part = end) {
            check_interrupted();
            side = &hand_over(*side, of_part(part), step);
            end = end_of_graph(part, pass);
            if (end > part)
                in_graph(*side, part, end, pass);
            else
                queue(*side, end++, pass, Answers::at_once);
        }
        finish(*side, pass);
        sides.synchronize(); // counts and records arrive, and failures of queued work belong to this step
        require_answered();
    }

    // PI_FFN_* of every token: the plan's tier, the batch's rules, the attention sink, and whether the file
    // wants the layer exact.
    std::vector<uint8_t> ffn_modes(const Step &step, bool exact_layer) const;

  private:
    // Parts of the way, in their order: the embedding, every layer, the first rows of the head.
    uint32_t n_parts() const { return model.config.n_layers + 2; }
    uint32_t first_part(const Step &step) const { return step.tokens.empty() ? 1 : 0; }
    Side &of_part(uint32_t part) const;
    // When the CPU computes its share of a split layer: while the device computes the layer, which alone is
    // queued; or after a series of layers was queued.
    enum class Answers { at_once, later };
    bool is_split(uint32_t part) const;
    // Whether the part is a split layer that the CPU has neurons of.
    bool needs_answer(uint32_t part) const;
    // Queues one part.
    void queue(Side &side, uint32_t part, const Pass &pass, Answers answers) const;
    // The CPU's shares of the split layers among parts [part, end), which are queued.
    void answer(uint32_t part, uint32_t end, const Pass &pass) const;
    // Throws Error where the device gave up waiting for an answer.
    void require_answered() const;
    // One beyond the last part of a graph that begins here; the part itself where none does.
    uint32_t end_of_graph(uint32_t part, const Pass &pass) const;
    // Queues parts [part, end), which are all on this side, at once if they were recorded before.
    void in_graph(Side &side, uint32_t part, uint32_t end, const Pass &pass) const;

    [[noreturn]] static void throw_interrupted();
    // The side of the first part.
    Side &begin(const Pass &pass) const;
    RopeAngles rope_angles(const Step &step) const;
    // Moves the residual stream to the next side, and returns that.
    Side &hand_over(Side &from, Side &to, const Step &step) const;
    void attention(Side &side, const Step &step, uint32_t layer) const;
    void ffn(Side &side, const Pass &pass, uint32_t layer) const;
    void split_ffn(Side &side, const Pass &pass, uint32_t layer, Answers answers) const;
    // Whether the device computes the CPU's neurons of split layers in such a step.
    bool is_streamed(uint32_t n_tokens) const;
    OnThreads on_threads() const; // of the CPU's side
    // The CPU's share of a split layer.
    void cold_ffn(const Pass &pass, uint32_t layer) const;
    // Whether predictors mask nothing in the layer.
    bool is_exact(uint32_t layer) const;
    FfnArgs ffn_args(const Side &side, const Pass &pass, uint32_t layer) const;
    uint64_t fired_words() const { return (model.config.n_ff + 63) / 64; }
    uint32_t rows_each() const { return std::min(plan.max_batch_tokens, Buffers::logit_rows); }
    // Logits of the rows [begin, begin + rows_each()) of step.rows.
    void head(Side &side, const Step &step, uint32_t begin) const;
    void finish(Side &side, const Pass &pass) const;
    void read_rows(Side &side, std::span<const uint32_t> rows, const Pass &pass) const;
    // Queues the wanted logits of the computed rows; returns where the rows' largest ones arrive.
    std::vector<float> queue_logits(Side &side, std::span<const uint32_t> rows, const Pass &pass) const;
};

} // namespace pi
