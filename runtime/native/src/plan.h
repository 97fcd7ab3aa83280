// plan.h: the engine's own copy of a pi_plan, checked against the model. Python plans; the engine executes
// what the plan says or refuses it.
#pragma once

#include "pi.h"
#include "weights.h"

namespace pi {

struct Plan {
    std::vector<pi_unit> units;
    std::vector<pi_tier> tiers;
    uint32_t n_threads;
    uint32_t max_batch_tokens;
    uint32_t n_sequences;
    uint32_t n_context;
    uint32_t n_kv_pages;
    uint32_t kv_type;
    uint32_t activation_type;
    bool predict_all;
    float sparse_threshold;
    uint64_t vram_budget_bytes;
    bool predict_split_only;
    uint32_t handover; // PI_HANDOVER_*
    uint32_t stream_tokens;
    uint32_t stream_piece_bytes;

    // Most tokens of a step that the CPU and its hand-over are made for: recorded, and never streamed.
    static constexpr uint32_t few_tokens = 16;

    // FFN mode of a step with n_tokens new tokens.
    uint32_t ffn_mode(uint32_t n_tokens) const;
};

enum class LayerKind : uint8_t { cpu, gpu, split };

// Where a layer is computed. Of a split layer attention, KV and predictor are the device's, and of its
// neurons [0, n_hot) from device memory and [n_hot, n_pull) from the host's; the CPU's are [n_pull, n_ff).
struct LayerPlacement {
    LayerKind kind = LayerKind::cpu;
    uint32_t n_hot = 0;
    uint32_t n_pull = 0;

    bool on_device() const { return kind != LayerKind::cpu; }
};

// What the plan puts on the device.
struct GpuPlacement {
    std::vector<LayerPlacement> layers; // CPU layers, then the others
    bool embedding = false;
    bool head = false;

    bool any() const;
    bool any_split() const;
    // Whether the CPU computes nothing.
    bool all() const;
    std::vector<uint8_t> on_device() const; // [n_layers] 1: attention and KV of the layer
};

GpuPlacement gpu_placement(const Plan &plan, const ModelConfig &config);

// Neurons where a layer may be split: a product of the device takes multiples of 32 columns, and those of a
// plain down matrix are cut between blocks.
uint32_t split_multiple(const LayerWeights &layer, const ModelConfig &config);

// Throws Error: PI_USAGE for a plan that contradicts itself or the model, PI_FAILURE for a placement that
// this library cannot execute.
Plan check_plan(const pi_plan &plan, const ModelConfig &config, const Weights &weights);

} // namespace pi
