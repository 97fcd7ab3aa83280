// library.h: the device library, loaded when a plan first asks for a device, and an open device that throws.
#pragma once

#include "../status.h"
#include "cuda/pi_gpu.h"

#include <cstdint>
#include <vector>

namespace pi {

// The library's interface. Throws Error (PI_FAILURE) saying what is missing: driver, library, or its version.
const pi_gpu_api &gpu_library();

// Throws Error with the device's text unless the call succeeded.
void check_gpu(const pi_gpu_api &api, int32_t status);

class GpuDevice {
  public:
    // budget_bytes: ceiling of everything on the device; 0: what is free.
    GpuDevice(uint32_t ordinal, uint64_t budget_bytes);
    ~GpuDevice() { api_.close(handle_); }
    GpuDevice(const GpuDevice &) = delete;
    GpuDevice &operator=(const GpuDevice &) = delete;

    // Calls an operation of the interface: call(&pi_gpu_api::record, x, n, words).
    template <typename... Params, typename... Args>
    void call(int32_t (*pi_gpu_api::*operation)(pi_gpu *, Params...), Args... args) const {
        check_gpu(api_, (api_.*operation)(handle_, args...));
    }
    template <typename T>
    T *allocate(uint64_t n) const {
        void *data = nullptr;
        call(&pi_gpu_api::allocate, n * sizeof(T), &data);
        return static_cast<T *>(data);
    }
    // A copy of the n values on the device.
    template <typename T>
    T *copy_of(const T *host, uint64_t n) const {
        T *data = allocate<T>(n);
        call(&pi_gpu_api::upload, host, n * sizeof(T), data);
        return data;
    }
    // Pinned host memory of n bytes.
    struct Pinned {
        void *host;
        void *device; // its address for operations
    };
    // Released with the object.
    class PinnedMemory {
      public:
        explicit PinnedMemory(const GpuDevice &device) : device_(device) {}
        ~PinnedMemory() {
            for (void *host : all_) // a failure is one that synchronize() has told
                static_cast<void>(device_.api_.release_host(device_.handle_, host));
        }
        PinnedMemory(const PinnedMemory &) = delete;
        PinnedMemory &operator=(const PinnedMemory &) = delete;

        Pinned allocate(uint64_t n_bytes) {
            Pinned memory{};
            all_.reserve(all_.size() + 1);
            device_.call(&pi_gpu_api::allocate_host, n_bytes, &memory.host, &memory.device);
            all_.push_back(memory.host);
            n_bytes_ += n_bytes;
            return memory;
        }
        uint64_t n_bytes() const { return n_bytes_; }

      private:
        const GpuDevice &device_;
        std::vector<void *> all_;
        uint64_t n_bytes_ = 0;
    };
    int32_t try_release(void *data) const noexcept { return api_.release(handle_, data); }
    int32_t try_release_graph(pi_gpu_graph *graph) const noexcept {
        return api_.release_graph(handle_, graph);
    }
    int32_t try_end_capture(pi_gpu_graph **out) const noexcept { return api_.end_capture(handle_, out); }
    const pi_gpu_api &api() const { return api_; }
    pi_gpu_info info() const;

  private:
    const pi_gpu_api &api_;
    pi_gpu *handle_ = nullptr;
};

} // namespace pi
