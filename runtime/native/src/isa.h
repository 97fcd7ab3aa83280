// isa.h: the kernel tables of this library and the choice of one.
#pragma once

#include "kernels/kernels.h"

#include <span>

namespace pi {

// Every table compiled in, from the slowest.
std::span<const pi_kernels *const> kernel_tables();

// `requested` (NULL or "": $PI_ISA, else the best usable table). Throws Error when the name is unknown or the
// processor cannot run it; the hint names the usable ones.
const pi_kernels &select_kernels(const char *requested);

} // namespace pi
