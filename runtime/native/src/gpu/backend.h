// backend.h: what the engine asks of the GPU backend.
#pragma once

#include "../forward.h"
#include "handover.h"

namespace pi {

// A backend on the first device, with everything that the placement puts there. Throws Error: no device or
// library, or PI_DOES_NOT_FIT under the plan's budget.
Backend open_gpu_backend(const pi_model &model, const Plan &plan, const GpuPlacement &placement);

// Memory for the pages of its layers; the stream outlives it.
std::unique_ptr<KvHome> make_gpu_pages(Stream &stream, const KvShape &shape,
                                       const std::vector<uint8_t> &layers);

// How split layers meet the CPU; null: the placement has none.
HandOver *gpu_hand_over(Stream &stream);

// What large steps compute the CPU's neurons of split layers from; null: the plan wants the CPU to.
ColdWeights *gpu_cold_weights(Stream &stream);

// Fills in the device's part of the statistics.
void describe_gpu(const Side &gpu, pi_stats &stats);

} // namespace pi
