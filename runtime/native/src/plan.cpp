#include "plan.h"

#include "kernels/kernels.h"
#include "status.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace pi {
namespace {

constexpr uint32_t max_threads = 4096;
constexpr uint32_t max_sequences = 1u << 16;
constexpr uint32_t max_context = 1u << 24;

void require_range(const char *name, uint32_t value, uint32_t lowest, uint32_t highest) {
    if (value < lowest || value > highest)
        throw_usage("plan." + std::string(name) + " = " + std::to_string(value) + " is not in " +
                    std::to_string(lowest) + " .. " + std::to_string(highest));
}

void check_mode(uint32_t mode, const ModelConfig &config) {
    if (mode > PI_FFN_PREDICTED)
        throw_usage("plan: unknown FFN mode " + std::to_string(mode));
    if (mode == PI_FFN_DENSE)
        return;
    if (!config.sparse_layout || config.activation != Activation::relu)
        throw Error(PI_USAGE, "this model is not ReLU-sparse: only the dense FFN mode computes it",
                    "use --ffn dense");
    if (mode == PI_FFN_PREDICTED && !config.has_predictors)
        throw Error(PI_USAGE, "the file has no predictors", "use --ffn exact, or convert with --predictors");
}

void check_tiers(const Plan &plan, const ModelConfig &config) {
    if (plan.tiers.empty())
        throw_usage("plan has no tiers");
    uint32_t before = 0;
    for (const pi_tier &tier : plan.tiers) {
        if (tier.max_tokens <= before)
            throw_usage("plan: tiers are not ascending");
        before = tier.max_tokens;
        check_mode(tier.ffn_mode, config);
    }
    if (before < plan.max_batch_tokens)
        throw_usage("plan: the last tier does not cover the batch");
}

// Every unit is placed exactly once and every neuron of every layer belongs to one unit. Ranges ascend in the
// plan.
class Coverage {
  public:
    explicit Coverage(const ModelConfig &config)
        : config_(config), neurons_(config.n_layers, 0), sides_(config.n_layers, 0),
          seen_(PI_UNIT_HEAD + 1, std::vector<uint8_t>(config.n_layers)) {}

    void add(const pi_unit &unit) {
        if (unit.kind > PI_UNIT_HEAD || unit.layer >= config_.n_layers)
            throw_usage("plan: a unit of no known kind or layer");
        if (unit.placement != PI_PLACE_CPU && unit.placement != PI_PLACE_GPU)
            throw Error(PI_FAILURE, "this runtime neither streams nor pulls weights");
        if (unit.kind != PI_UNIT_EMBEDDING && unit.kind != PI_UNIT_HEAD)
            require_one_side(unit);
        if (unit.kind == PI_UNIT_NEURONS)
            return add_neurons(unit);
        if (std::exchange(seen_[unit.kind][unit.layer], uint8_t{1}) != 0)
            throw_usage("plan: a unit is placed twice");
    }
    void finish() const {
        for (uint32_t layer = 0; layer < config_.n_layers; ++layer) {
            const bool whole = seen_[PI_UNIT_ATTENTION][layer] != 0 && seen_[PI_UNIT_KV][layer] != 0 &&
                               neurons_[layer] == config_.n_ff &&
                               (!config_.has_predictors || seen_[PI_UNIT_PREDICTOR][layer] != 0);
            if (!whole)
                throw_usage("plan: layer " + std::to_string(layer) + " is not placed as a whole");
        }
        if (seen_[PI_UNIT_EMBEDDING][0] == 0 || seen_[PI_UNIT_HEAD][0] == 0)
            throw_usage("plan: the embedding or the output head is not placed");
    }

  private:
    void require_one_side(const pi_unit &unit) {
        const uint8_t side = unit.placement == PI_PLACE_GPU ? 2 : 1;
        if (sides_[unit.layer] != 0 && sides_[unit.layer] != side)
            throw Error(PI_FAILURE, "the plan splits layer " + std::to_string(unit.layer) +
                                        " between CPU and GPU, which this runtime does not do");
        sides_[unit.layer] = side;
    }
    void add_neurons(const pi_unit &unit) {
        if (unit.begin != neurons_[unit.layer] || unit.end <= unit.begin || unit.end > config_.n_ff)
            throw_usage("plan: neuron ranges of layer " + std::to_string(unit.layer) +
                        " do not follow each other");
        neurons_[unit.layer] = unit.end;
    }

    const ModelConfig &config_;
    std::vector<uint32_t> neurons_; // placed so far, per layer
    std::vector<uint8_t> sides_;    // 0: not known yet, 1: CPU, 2: GPU
    std::vector<std::vector<uint8_t>> seen_;
};

void check_sizes(const Plan &plan) {
    require_range("n_threads", plan.n_threads, 1, max_threads);
    require_range("n_sequences", plan.n_sequences, 1, max_sequences);
    require_range("n_context", plan.n_context, 1, max_context);
    require_range("max_batch_tokens", plan.max_batch_tokens, 1, max_context);
    require_range("n_kv_pages", plan.n_kv_pages, (plan.n_context + PI_PAGE - 1) / PI_PAGE,
                  UINT32_MAX / PI_PAGE);
    if (plan.kv_type != PI_TYPE_F32 && plan.kv_type != PI_TYPE_F16)
        throw_usage("plan.kv_type is neither F32 nor F16");
    if (plan.activation_type != PI_TYPE_F32 && plan.activation_type != PI_TYPE_Q8_0)
        throw_usage("plan.activation_type is neither F32 nor Q8_0");
}

} // namespace

uint32_t Plan::ffn_mode(uint32_t n_tokens) const {
    for (const pi_tier &tier : tiers) {
        if (n_tokens <= tier.max_tokens)
            return tier.ffn_mode;
    }
    return tiers.back().ffn_mode;
}

bool GpuPlacement::any() const {
    return embedding || head || std::count(layers.begin(), layers.end(), 1) > 0;
}

bool GpuPlacement::all() const {
    return embedding && head && std::count(layers.begin(), layers.end(), 0) == 0;
}

GpuPlacement gpu_placement(const Plan &plan, const ModelConfig &config) {
    GpuPlacement placement;
    placement.layers.resize(config.n_layers);
    for (const pi_unit &unit : plan.units) {
        const bool here = unit.placement == PI_PLACE_GPU;
        if (unit.kind == PI_UNIT_EMBEDDING)
            placement.embedding = here;
        else if (unit.kind == PI_UNIT_HEAD)
            placement.head = here;
        else if (here)
            placement.layers[unit.layer] = 1;
    }
    return placement;
}

Plan check_plan(const pi_plan &plan, const ModelConfig &config) {
    require_size(plan, "plan");
    if (plan.units == nullptr || plan.tiers == nullptr)
        throw_usage("plan has no units or tiers");
    Plan checked{{plan.units, plan.units + plan.n_units},
                 {plan.tiers, plan.tiers + plan.n_tiers},
                 plan.n_threads,
                 plan.max_batch_tokens,
                 plan.n_sequences,
                 plan.n_context,
                 plan.n_kv_pages,
                 plan.kv_type,
                 plan.activation_type,
                 plan.predict_all != 0,
                 std::isnan(plan.sparse_threshold) ? config.sparse_threshold : plan.sparse_threshold,
                 plan.vram_budget_bytes};
    check_sizes(checked);
    check_tiers(checked, config);
    Coverage coverage(config);
    for (const pi_unit &unit : checked.units)
        coverage.add(unit);
    coverage.finish();
    return checked;
}

} // namespace pi
