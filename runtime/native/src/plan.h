// plan.h: the engine's own copy of a pi_plan, checked against the model. Python plans; the engine executes
// what the plan says or refuses it.
#pragma once

#include "config.h"
#include "pi.h"

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

    // FFN mode of a step with n_tokens new tokens.
    uint32_t ffn_mode(uint32_t n_tokens) const;
};

// What the plan puts on the device.
struct GpuPlacement {
    std::vector<uint8_t> layers; // [n_layers] 1: the whole layer with its KV
    bool embedding = false;
    bool head = false;

    bool any() const;
    bool all() const;
};

GpuPlacement gpu_placement(const Plan &plan, const ModelConfig &config);

// Throws Error: PI_USAGE for a plan that contradicts itself or the model, PI_FAILURE for a placement that
// this library cannot execute.
Plan check_plan(const pi_plan &plan, const ModelConfig &config);

} // namespace pi
