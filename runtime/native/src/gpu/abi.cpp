// abi.cpp: pi.h's functions on devices.
#include "library.h"

uint32_t pi_gpu_count(void) {
    uint32_t n_devices = 0;
    const pi_status status = pi::guarded([&] {
        const pi_gpu_api &api = pi::gpu_library();
        pi::check_gpu(api, api.count(&n_devices));
    });
    return status == PI_OK ? n_devices : 0;
}

pi_status pi_gpu_probe(uint32_t ordinal, pi_gpu_device *out) {
    return pi::guarded([&] {
        pi::require_size(pi::require(out, "out"), "device");
        const pi_gpu_info info = pi::GpuDevice(ordinal, 0).info();
        out->capability = info.capability;
        static thread_local std::string name;
        name = info.name;
        out->name = name.c_str();
        out->n_processors = static_cast<uint32_t>(info.n_processors);
        out->total_bytes = info.total_bytes;
        out->free_bytes = info.free_bytes;
        out->context_bytes = info.context_bytes;
    });
}
