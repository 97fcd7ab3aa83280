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

std::string of_layer(uint32_t layer) {
    return "plan: layer " + std::to_string(layer);
}

// Every unit is placed exactly once and every neuron of every layer belongs to one unit. Ranges ascend in the
// plan: of a split layer the device's first, then those it pulls, then the CPU's.
class Coverage {
  public:
    explicit Coverage(const ModelConfig &config)
        : config_(config), layers_(config.n_layers),
          seen_(PI_UNIT_HEAD + 1, std::vector<uint8_t>(config.n_layers)) {}

    void add(const pi_unit &unit) {
        if (unit.kind > PI_UNIT_HEAD || unit.layer >= config_.n_layers)
            throw_usage("plan: a unit of no known kind or layer");
        if (unit.placement > PI_PLACE_PULL)
            throw_usage("plan: a unit of no known placement");
        if (unit.placement == PI_PLACE_STREAM)
            throw Error(PI_FAILURE, "this runtime does not stream weights");
        if (unit.kind == PI_UNIT_NEURONS)
            return add_neurons(unit);
        if (unit.placement == PI_PLACE_PULL)
            throw Error(PI_FAILURE, of_layer(unit.layer) + ": only neurons can be pulled");
        if (unit.kind != PI_UNIT_EMBEDDING && unit.kind != PI_UNIT_HEAD)
            require_one_side(unit);
        if (std::exchange(seen_[unit.kind][unit.layer], uint8_t{1}) != 0)
            throw_usage("plan: a unit is placed twice");
    }
    void finish() const {
        for (uint32_t layer = 0; layer < config_.n_layers; ++layer) {
            const bool whole = seen_[PI_UNIT_ATTENTION][layer] != 0 && seen_[PI_UNIT_KV][layer] != 0 &&
                               layers_[layer].n_neurons == config_.n_ff &&
                               (!config_.has_predictors || seen_[PI_UNIT_PREDICTOR][layer] != 0);
            if (!whole)
                throw_usage(of_layer(layer) + " is not placed as a whole");
            if (layers_[layer].side == PI_PLACE_CPU && layers_[layer].first != PI_PLACE_CPU)
                throw Error(PI_FAILURE, of_layer(layer) + " has neurons on the GPU, but not its attention",
                            "a split layer has its attention, KV cache and predictor on the GPU");
        }
        if (seen_[PI_UNIT_EMBEDDING][0] == 0 || seen_[PI_UNIT_HEAD][0] == 0)
            throw_usage("plan: the embedding or the output head is not placed");
    }

  private:
    static constexpr uint32_t unknown = UINT32_MAX;
    struct Layer {
        uint32_t side = unknown;  // of attention, KV and predictor
        uint32_t n_neurons = 0;   // placed so far
        uint32_t first = unknown; // where the first and the last of them are
        uint32_t latest = unknown;
    };

    void require_one_side(const pi_unit &unit) {
        const uint32_t before = std::exchange(layers_[unit.layer].side, unit.placement);
        if (before != unknown && before != unit.placement)
            throw Error(PI_FAILURE, of_layer(unit.layer) +
                                        " has its attention, KV cache and predictor on different sides");
    }
    // GPU, pulled, CPU: in this order.
    static uint32_t rank(uint32_t placement) {
        return placement == PI_PLACE_GPU ? 0 : placement == PI_PLACE_PULL ? 1 : 2;
    }
    void add_neurons(const pi_unit &unit) {
        Layer &layer = layers_[unit.layer];
        if (unit.begin != layer.n_neurons || unit.end <= unit.begin || unit.end > config_.n_ff)
            throw_usage("plan: neuron ranges of layer " + std::to_string(unit.layer) +
                        " do not follow each other");
        if (unit.begin == 0)
            layer.first = unit.placement;
        const uint32_t before = std::exchange(layer.latest, unit.placement);
        if (before != unknown && rank(before) > rank(unit.placement))
            throw_usage(of_layer(unit.layer) +
                        ": neurons of the GPU come first, then pulled ones, then the CPU's");
        layer.n_neurons = unit.end;
    }

    const ModelConfig &config_;
    std::vector<Layer> layers_;
    std::vector<std::vector<uint8_t>> seen_;
};

void check_placement(const GpuPlacement &placement, const ModelConfig &config, const Weights &weights) {
    bool device = false;
    for (uint32_t layer = 0; layer < config.n_layers; ++layer) {
        const LayerPlacement &placed = placement.layers[layer];
        if (device && !placed.on_device())
            throw Error(PI_FAILURE, of_layer(layer) + " is on the CPU behind a layer on the GPU",
                        "layers on the CPU come first");
        device = placed.on_device();
        const uint32_t multiple = split_multiple(weights.layers[layer], config);
        for (const uint32_t n : {placed.n_hot, placed.n_pull}) {
            if (n != config.n_ff && n % multiple != 0)
                throw_usage(of_layer(layer) + " is split at neuron " + std::to_string(n) +
                            ", not at a multiple of " + std::to_string(multiple));
        }
    }
}

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
    if (plan.stream_tokens != 0 && plan.stream_tokens <= Plan::few_tokens)
        throw_usage("plan.stream_tokens = " + std::to_string(plan.stream_tokens) + " is not above " +
                    std::to_string(Plan::few_tokens));
    require_range("handover", plan.handover, PI_HANDOVER_AUTO, PI_HANDOVER_EVENT);
    if (plan.predict_all && plan.predict_split_only)
        throw_usage("plan: predict_all masks every layer, predict_split_only does not");
}

} // namespace

uint32_t split_multiple(const LayerWeights &layer, const ModelConfig &config) {
    const uint32_t block = config.sparse_layout ? 1 : layer.down.type->block_elements;
    return std::max(32u, block);
}

uint32_t Plan::ffn_mode(uint32_t n_tokens) const {
    for (const pi_tier &tier : tiers) {
        if (n_tokens <= tier.max_tokens)
            return tier.ffn_mode;
    }
    return tiers.back().ffn_mode;
}

bool GpuPlacement::any() const {
    return embedding || head || (!layers.empty() && layers.back().on_device());
}

bool GpuPlacement::any_split() const {
    const auto split = [](const LayerPlacement &layer) { return layer.kind == LayerKind::split; };
    return std::any_of(layers.begin(), layers.end(), split);
}

bool GpuPlacement::all() const {
    const auto whole = [](const LayerPlacement &layer) { return layer.kind == LayerKind::gpu; };
    return embedding && head && std::all_of(layers.begin(), layers.end(), whole);
}

std::vector<uint8_t> GpuPlacement::on_device() const {
    std::vector<uint8_t> flags;
    for (const LayerPlacement &layer : layers)
        flags.push_back(layer.on_device() ? 1 : 0);
    return flags;
}

GpuPlacement gpu_placement(const Plan &plan, const ModelConfig &config) {
    GpuPlacement placement;
    placement.layers.resize(config.n_layers);
    for (const pi_unit &unit : plan.units) {
        const bool here = unit.placement == PI_PLACE_GPU;
        LayerPlacement &layer = placement.layers[unit.layer];
        if (unit.kind == PI_UNIT_EMBEDDING) {
            placement.embedding = here;
        } else if (unit.kind == PI_UNIT_HEAD) {
            placement.head = here;
        } else if (unit.kind == PI_UNIT_ATTENTION) {
            layer.kind = here ? LayerKind::gpu : LayerKind::cpu;
        } else if (unit.kind == PI_UNIT_NEURONS && unit.placement != PI_PLACE_CPU) {
            layer.n_hot = here ? unit.end : layer.n_hot;
            layer.n_pull = unit.end;
        }
    }
    for (LayerPlacement &layer : placement.layers) {
        if (layer.on_device() && layer.n_hot < config.n_ff)
            layer.kind = LayerKind::split;
    }
    return placement;
}

Plan check_plan(const pi_plan &plan, const ModelConfig &config, const Weights &weights) {
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
                 plan.vram_budget_bytes,
                 plan.predict_split_only != 0,
                 plan.handover,
                 plan.stream_tokens,
                 plan.stream_piece_bytes};
    check_sizes(checked);
    check_tiers(checked, config);
    Coverage coverage(config);
    for (const pi_unit &unit : checked.units)
        coverage.add(unit);
    coverage.finish();
    check_placement(gpu_placement(checked, config), config, weights);
    return checked;
}

} // namespace pi
