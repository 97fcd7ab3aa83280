// api.cpp: the library's one export.
#include "operations.h"

namespace {

const pi_gpu_api api = {
    .abi = PI_GPU_ABI,
    .error = pi_cuda::error_text,
    .count = pi_cuda::count_devices,
    .open = pi_cuda::open,
    .close = pi_cuda::close,
    .info = pi_cuda::info,
    .reserve = pi_cuda::reserve,
    .allocate = pi_cuda::allocate,
    .release = pi_cuda::release,
    .upload = pi_cuda::upload,
    .download = pi_cuda::download,
    .copy = pi_cuda::copy,
    .zero = pi_cuda::zero,
    .synchronize = pi_cuda::synchronize,
    .measure_read = pi_cuda::measure_read,
    .begin_capture = pi_cuda::begin_capture,
    .end_capture = pi_cuda::end_capture,
    .launch_graph = pi_cuda::launch_graph,
    .release_graph = pi_cuda::release_graph,
    .row_stride = pi_cuda::row_stride,
    .upload_rows = pi_cuda::upload_rows,
    .bring = pi_cuda::bring,
    .await_brought = pi_cuda::await_brought,
    .take_apart = pi_cuda::take_apart,
    .fetch_rows = pi_cuda::fetch_rows,
    .multiply = pi_cuda::multiply,
    .neurons = pi_cuda::neurons,
    .multiply_transposed = pi_cuda::multiply_transposed,
    .gather = pi_cuda::gather,
    .rms_norm = pi_cuda::rms_norm,
    .gated = pi_cuda::gated,
    .log_probabilities = pi_cuda::log_probabilities,
    .top = pi_cuda::top,
    .record = pi_cuda::record,
    .place_heads = pi_cuda::place_heads,
    .attend = pi_cuda::attend,
    .mask = pi_cuda::mask,
    .hide = pi_cuda::hide,
    .allocate_host = pi_cuda::allocate_host,
    .release_host = pi_cuda::release_host,
    .query = pi_cuda::query,
    .waits = pi_cuda::waits,
    .post = pi_cuda::post,
    .merge = pi_cuda::merge,
    .stamp = pi_cuda::stamp,
};

} // namespace

extern "C" __attribute__((visibility("default"))) const pi_gpu_api *pi_gpu_api_get(uint32_t abi) {
    return abi == PI_GPU_ABI ? &api : nullptr;
}
