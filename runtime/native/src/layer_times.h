// layer_times.h: what the sides of every layer did, summed over steps.
#pragma once

#include "ops.h"
#include "pi.h"
#include "plan.h"

namespace pi {

class LayerTimes {
  public:
    explicit LayerTimes(uint32_t n_layers) : times_(n_layers) {}

    void clear() { std::fill(times_.begin(), times_.end(), pi_layer_times{}); }
    // Adds a step. cpu, gpu: [n_layers] of its sides; null where there is no such side.
    void add(const GpuPlacement &placement, const LayerStamps *cpu, const LayerStamps *gpu);
    const std::vector<pi_layer_times> &all() const { return times_; }

  private:
    std::vector<pi_layer_times> times_;
};

} // namespace pi
