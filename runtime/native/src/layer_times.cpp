#include "layer_times.h"

#include <algorithm>

namespace pi {
namespace {

// From one moment to the next; 0 where the later one was not reached, or not stamped.
uint64_t between(uint64_t begin, uint64_t end) {
    return end > begin ? end - begin : 0;
}

// The clocks of the sides are never compared. Between its post and its answer the CPU works, and the rest is
// way; as far as the device had something to do meanwhile, the way cost nothing.
void add_split(const LayerStamps &stamps, pi_layer_times &times) {
    const uint64_t wait = between(stamps.shares, stamps.end);
    const uint64_t pull = between(stamps.hot, stamps.shares);
    const uint64_t way = between(stamps.cpu_ns, between(stamps.posted, stamps.end));
    times.gpu_ns += between(stamps.begin, stamps.hot);
    times.pull_ns += pull;
    times.gpu_wait_ns += wait;
    times.cpu_ns += stamps.cpu_ns;
    times.cpu_wait_ns += stamps.cpu_wait_ns;
    times.handover_ns += stamps.posted == 0 ? 0 : std::min(way, wait);
}

} // namespace

void LayerTimes::add(const GpuPlacement &placement, const LayerStamps *cpu, const LayerStamps *gpu) {
    for (size_t layer = 0; layer < times_.size(); ++layer) {
        const LayerKind kind = placement.layers[layer].kind;
        pi_layer_times &times = times_[layer];
        ++times.n_steps;
        if (kind == LayerKind::split)
            add_split(gpu[layer], times);
        else if (kind == LayerKind::gpu)
            times.gpu_ns += between(gpu[layer].begin, gpu[layer].end);
        else
            times.cpu_ns += between(cpu[layer].begin, cpu[layer].end);
    }
}

} // namespace pi
