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

pi_status pi_gpu_probe_read(uint32_t ordinal, uint32_t from_host, uint64_t n_bytes, float min_seconds,
                            uint64_t *bytes_per_second) {
    return pi::guarded([&] {
        pi::require(bytes_per_second, "bytes_per_second");
        if (!(min_seconds >= 0.0f && min_seconds <= 60.0f))
            pi::throw_usage("min_seconds must be 0 to 60");
        pi::GpuDevice(ordinal, 0)
            .call(&pi_gpu_api::measure_read, from_host, n_bytes, min_seconds, bytes_per_second);
    });
}
