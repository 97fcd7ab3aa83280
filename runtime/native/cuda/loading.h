// loading.h: kernels loaded into a context before any of them runs. One that is loaded at its first launch
// takes memory that nobody counted, and may wait for a kernel that itself waits for the host.
#pragma once

namespace pi_cuda {

// For the process, unless $CUDA_MODULE_LOADING says otherwise: all kernels of every library with the context,
// or each when it is first used. Read when the driver starts, so this comes before every other call.
void choose_loading(bool when_used);
// Whether the driver can load them by hand, and $CUDA_MODULE_LOADING does not forbid it.
bool may_load_when_used();
// All kernels of this library, into the current context. Throws Failure where the driver cannot (before CUDA
// 12.4).
void load_own_kernels();

} // namespace pi_cuda
