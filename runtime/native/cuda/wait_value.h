// wait_value.h: a wait of the stream itself; on the emulator it is its own.
#pragma once

#include "gpu.h"

#include <cstdint>

namespace pi_cuda {

bool can_wait_for_values();
// What is queued behind it begins once *at, host memory by its device address, is at least the value. It may
// be recorded into a graph.
void wait_for_value(cudaStream_t stream, const uint32_t *at, uint32_t value);

} // namespace pi_cuda
